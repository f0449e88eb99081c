"""Tiny models and a composed configuration for the tests of the training half."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src import config as cfg

# All seven kinds of projection of a Llama layer; input widths 24 and, for down_proj, 44.
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a LlamaForCausalLM in evaluation mode, random weights large enough for peaked distributions.

    Token 0 is padding, token 1 ends a response. Its norms compute in float32 even where the weights are float64.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 29,
        "hidden_size": 24,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**(settings | options))).to(dtype).eval()


class Mlp(nn.Module):
    """Embedding, two linear layers with bias and a head, without any float32 inside: logits of next tokens."""

    def __init__(self, vocabulary: int = 17, width: int = 12, hidden: int = 20):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def mlp(dtype: torch.dtype = torch.float64, **sizes: int) -> Mlp:
    """Return an Mlp with the same random weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Mlp(**sizes).to(dtype)


def tokens(rows: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Return random token ids (rows, length), none of them 0 or 1."""
    return torch.randint(2, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def composed(*overrides: str) -> cfg.Config:
    """Return the configuration that the command line `overrides` would give."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(__file__).parents[1] / "conf"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        values = OmegaConf.to_container(compose("train", list(overrides)), resolve=True)
    assert isinstance(values, dict)
    return cfg.from_dict(values)
