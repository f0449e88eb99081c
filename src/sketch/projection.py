"""Random projections from a counter hash: no generator has a state.

Legend: R rank, N input width. A projection A has shape (R, N) and E[A^T A] = I_N.

Every bit is a pure function of (key, position), computed in 64-bit integer arithmetic, so the discrete families (all
but gaussian and stiefel, which round) are the same on every device, in every thread count and after every restart. The
hash is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose output
function mixes a counter.

The error of G A^T A as an estimate of G, E||G A^T A - G||^2 / ||G||^2, is the same for every G:

    rademacher, countsketch    (N - 1) / R
    gaussian                   (N + 1) / R
    stiefel, coordinate        N / R - 1
    srht                       N / R - 1 + (R - 1)(P - N) / (R (P - 1)), P the power of two that N is padded to
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

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
    bits_RN = _bits(hash_words(key, counters).view(rank, words_per_row), width)
    return bits_RN.to(dtype).mul_(2.0).sub_(1.0).mul_(rank**-0.5)


def gaussian(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N) of independent normal numbers of variance 1/R (Box and Muller's transform of hashed uniforms)."""
    pairs = -(-rank * width // 2)
    counters = torch.arange(pairs, dtype=torch.int64, device=device)
    radius = (-2.0 * torch.log1p(-hash_uniform(key, counters))).sqrt_()  # 1 - uniform is never 0
    angle = hash_uniform(key, counters + pairs).mul_(2.0 * math.pi)
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()])[: rank * width]
    return normal.mul_(rank**-0.5).view(rank, width).to(dtype)


def stiefel(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N) = sqrt(N / R) Q^T, Q uniform among the matrices with R orthonormal columns (Haar measure).

    QR of a Gaussian matrix with the signs that make R's diagonal positive (Mezzadri, arXiv math-ph/0609050).
    """
    q_NR, upper_RR = torch.linalg.qr(gaussian(rank, width, key, torch.float64, device).T)
    return (q_NR * upper_RR.diagonal().sign() * (width / rank) ** 0.5).T.to(dtype).contiguous()


def srht(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N), R rows of a Hadamard matrix without replacement, its columns with random signs, over sqrt(R).

    The matrix has a power of two of columns, of which the first N are used. Its entry (i, n) is the parity of i & n.
    """
    padded = 1 << max(0, width - 1).bit_length()
    rows_R = _subset(padded, rank, hash_key("rows", key), device)
    columns_N = torch.arange(width, device=device)
    parity_RN = _parity(rows_R[:, None] & columns_N)
    (signs_N,) = signs(width, [hash_key("signs", key)], device)
    return (1.0 - 2.0 * parity_RN.to(dtype)).mul_(signs_N).mul_(rank**-0.5)


def coordinate(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N), sqrt(N / R) times R rows of the identity without replacement: S is a part of the gradient."""
    projection_RN = torch.zeros(rank, width, dtype=dtype, device=device)
    columns_R = _subset(width, rank, key, device)
    projection_RN[torch.arange(rank, device=device), columns_R] = (width / rank) ** 0.5
    return projection_RN


def countsketch(
    rank: int, width: int, key: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return A (R, N) with one random sign in each column, at a random row."""
    columns_N = torch.arange(width, device=device)
    rows_N = (hash_uniform(hash_key("rows", key), columns_N) * rank).long()
    projection_RN = torch.zeros(rank, width, dtype=dtype, device=device)
    projection_RN[rows_N, columns_N] = signs(width, [hash_key("signs", key)], device)[0].to(dtype)
    return projection_RN


def signs(width: int, keys: list[int], device: torch.device | None = None) -> Tensor:
    """Return N independent random signs +-1 for each key, (keys, N) int8."""
    counters = torch.arange(-(-width // _WORD_BITS), dtype=torch.int64, device=device)
    words = hash_words(torch.tensor(keys, dtype=torch.int64, device=device)[:, None], counters)
    return _bits(words, width).to(torch.int8).mul_(2).sub_(1)


Family = Literal["rademacher", "gaussian", "stiefel", "srht", "coordinate", "countsketch"]
FAMILIES: dict[str, Callable[..., Tensor]] = dict(
    zip(get_args(Family), (rademacher, gaussian, stiefel, srht, coordinate, countsketch), strict=True)
)


# The families whose columns differ in norm.
_UNEVEN = (gaussian, stiefel, coordinate)


class Group(NamedTuple):
    """Layers that have one projection: `label` tells groups apart, dtype and device are where it is needed."""

    label: str
    width: int
    dtype: torch.dtype
    device: torch.device


class Projections:
    """The projections of one draw: a base A for each input width, and a column of signs for each group of layers.

    A layer's projection is the base of its width with the signs of its group, A diag(s): E[A^T A] stays I, and the
    errors of two groups are uncorrelated. What is kept is a base a width and a byte a column and group. Where A^T A has
    a random diagonal, which no signs change, a group's base is also shifted along its columns.

    Args:
        family: called as (rank, width, key, dtype, device), returns a base (rank, width); one of FAMILIES, or another
            with E[A^T A] = I.
        stream: tells independent projections of the same seed, draw and groups apart.
        share: False draws and keeps each group's A by itself, as the published scheme does (arXiv 2610.06647).
    """

    def __init__(
        self,
        family: Callable[..., Tensor],
        rank: int,
        seed: int,
        draw: int,
        stream: str,
        groups: Iterable[Group],
        share: bool = True,
    ):
        self._own: dict[Group, Tensor] = {}
        self._shifts: dict[Group, int] = {}
        self._bases: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._signs: dict[Group, Tensor] = {}
        alike: dict[tuple[int, torch.dtype, torch.device], list[Group]] = {}
        if not share:
            for group in dict.fromkeys(groups):
                self._own[group] = family(rank, group.width, hash_key(stream, seed, draw, group.label), *group[2:])
            return
        for group in dict.fromkeys(groups):
            alike.setdefault(group[1:], []).append(group)
        for (width, dtype, device), members in alike.items():
            key = hash_key(stream, seed, draw, width)
            self._bases[width, dtype, device] = family(rank, width, key, dtype, device)
            keys = [hash_key(stream, seed, draw, "signs", group.label) for group in members]
            self._signs |= dict(zip(members, signs(width, keys, device), strict=True))
            if family in _UNEVEN:
                self._shifts |= {group: hash_key(stream, seed, draw, "shift", group.label) % width for group in members}

    def of(self, group: Group) -> Tensor:
        """Return a group's A (R, N)."""
        if group in self._own:
            return self._own[group]
        base_RN = self._bases[group[1:]]
        if group in self._shifts:
            base_RN = base_RN.roll(self._shifts[group], 1)
        return base_RN * self._signs[group]

    def gram(self, group: Group) -> Tensor:
        """Return A A^T (R, R), in which signs cancel and shifts do not count."""
        base_RN = self._own[group] if self._own else self._bases[group[1:]]
        return base_RN @ base_RN.T

    def tensors(self) -> list[Tensor]:
        """Return what is kept."""
        return [*self._bases.values(), *self._signs.values(), *self._own.values()]


def _bits(words: Tensor, width: int) -> Tensor:
    """Return the first `width` bits of each row of 64-bit words (rows, words), lowest first; uint8."""
    octets = words.view(torch.uint8)[..., None]  # the lowest first on every machine that torch runs on
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((octets >> shifts) & 1).flatten(1)[:, :width]


def _subset(count: int, size: int, key: int, device: torch.device | None) -> Tensor:
    """Return `size` different numbers below `count`, each subset equally likely: where the smallest hashes are."""
    return hash_words(key, torch.arange(count, device=device)).argsort(stable=True)[:size]


def _parity(words: Tensor) -> Tensor:
    """Return 1 where an odd number of a word's lower 32 bits is set, else 0."""
    for shift in (16, 8, 4, 2, 1):
        words = words ^ (words >> shift)
    return words & 1
