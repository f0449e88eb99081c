"""Stateless random numbers: every draw is a function of (seed, stream, ...), so resuming needs no state.

A stream is a word: initialisation, data, rollout, evaluation, projection, ... The variants of one seed read the same
streams at the same places and so see the same prompts and the same sampling noise.
"""

import random

import torch
from torch import Tensor

from src.sketch.projection import hash_key, hash_uniform

__all__ = ["generator", "hash_key", "python_random", "uniform"]


def python_random(*place: int | str) -> random.Random:
    """Return a Python generator that starts at a place, e.g. ("data", seed, update, item)."""
    return random.Random(hash_key(*place))


def generator(*place: int | str) -> torch.Generator:
    """Return a CPU torch generator that starts at a place."""
    return torch.Generator().manual_seed(hash_key(*place) & (2**63 - 1))


def uniform(keys_B: Tensor, position: int) -> Tensor:
    """Return one float64 number in [0, 1) for each row's key at a position, shape (B,)."""
    return hash_uniform(keys_B, torch.full_like(keys_B, position))
