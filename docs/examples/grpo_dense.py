# python docs/examples/grpo_dense.py
"""Teaches a tiny Llama to answer with a digit that is larger than the one it is shown, with TRL's GRPOTrainer."""

from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789<"])}
characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
characters.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
dataset = Dataset.from_list([{"prompt": f"{digit}<"} for digit in range(9)] * 20)


def reward(prompts, completions, **columns):
    return [float(c.isdigit() and int(c) > int(p[0])) for p, c in zip(prompts, completions, strict=True)]


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.1,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
model = LlamaForCausalLM(config)
with TemporaryDirectory() as folder:
    args = GRPOConfig(
        output_dir=folder,
        max_steps=20,
        learning_rate=3e-3,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=1,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        reward_funcs=reward,
    )
    trainer.remove_callback(PrinterCallback)  # it prints all numbers of a step
    trainer.train()
    for logs in trainer.state.log_history:
        if "reward" in logs:
            print(f"step {logs['step']}: reward {logs['reward']:.2f}")
    weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    print(f"weights that require a gradient: {weights / 1024:.0f} KiB")
