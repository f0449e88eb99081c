# python docs/examples/trainer_dense.py
"""Teaches a tiny Llama the sums of two digits with transformers' Trainer."""

from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ALPHABET = "0123456789+="
texts = [f"{a}+{b}={a + b:02d}" for a in range(10) for b in range(10)]
tokens = [[ALPHABET.index(character) for character in text] for text in texts]
dataset = [{"input_ids": ids, "labels": ids} for ids in tokens]

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
with TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset,
    )
    trainer.train()
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    print(f"weights that require a gradient: {weights / 1024:.0f} KiB")
