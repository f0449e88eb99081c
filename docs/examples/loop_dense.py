# python docs/examples/loop_dense.py
"""Teaches a tiny Llama the sums of two digits, in a loop of one's own."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ALPHABET = "0123456789+="
texts = [f"{a}+{b}={a + b:02d}" for a in range(10) for b in range(10)]
tokens = torch.tensor([[ALPHABET.index(character) for character in text] for text in texts])

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(ALPHABET),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, 101):
    batch = tokens[torch.randint(len(tokens), (32,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    if step % 20 == 0:
        weights = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        print(f"step {step}: loss {loss.item():.3f}, gradients of weights {weights / 1024:.0f} KiB")
    optimizer.step()
    optimizer.zero_grad()
