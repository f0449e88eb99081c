"""Random projections from a counter hash: nothing is stored and no generator has a state.

Legend: R rank, N input width. A projection A has shape (R, N) and E[A^T A] = I_N.

Every bit is a pure function of (key, position), computed in 64-bit integer arithmetic, so a projection is the
same on every device, in every thread count and after every restart. The hash is splitmix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose output function mixes a counter.
"""

import hashlib

import torch
from torch import Tensor

_WORD_BITS = 64
# splitmix64's constants, written as the signed integers that torch.int64 holds.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# Segments that wrappers put into a parameter's path; a wrapped model keeps its projections.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def stable_name(name: str) -> str:
    """Return a module path without the segments that compile, FSDP or checkpoint wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def hash_key(*parts: int | str) -> int:
    """Return a signed 64-bit key for a tuple of integers and strings (BLAKE2b of their text)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 words (torch's own shift copies the sign bit)."""
    return (words >> bits) & ((1 << (_WORD_BITS - bits)) - 1)


def hash_words(key: int | Tensor, counters: Tensor) -> Tensor:
    """Return splitmix64(key + golden * counter), int64, shape of `counters` (broadcast with `key`)."""
    words = counters * _GOLDEN + key
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


def hash_uniform(key: int | Tensor, counters: Tensor) -> Tensor:
    """Return float64 numbers in [0, 1), one for each counter: the upper 53 bits of its hash."""
    return _shift_right(hash_words(key, counters), 11).double() * 2.0**-53


def rademacher(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N) of independent signs +-1/sqrt(R).

    E[A^T A] = I_N; the relative mean squared error of G A^T A as an estimate of G is (N - 1) / R. The first r
    rows of a rank-R draw are, but for the scale, the rank-r draw of the same key.
    """
    words_per_row = -(-width // _WORD_BITS)
    counters = torch.arange(rank * words_per_row, dtype=torch.int64, device=device)
    words = hash_words(key, counters).view(rank, words_per_row, 1)
    bits = (words >> torch.arange(_WORD_BITS, device=device)) & 1
    signs_RN = bits.view(rank, -1)[:, :width].to(dtype)
    return signs_RN.mul_(2.0).sub_(1.0).mul_(rank**-0.5)
