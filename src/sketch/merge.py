"""Adding a low-rank displacement to stored weights, and counting how many of them it moved.

Legend: M output width, N input width, R rank.
"""

import torch
from torch import Tensor

from src.sketch.projection import hash_key, hash_words

# Elements of a matrix that are held in float32 at a time: 4 MiB, and a few times as much of random bits.
_BLOCK = 1 << 20
# Elements of a matrix that are looked at to tell how many moved.
_SAMPLE = 1 << 16


def merge(weight_MN: Tensor, left_MR: Tensor, right_RN: Tensor, keep: float, scale: float) -> None:
    """W <- keep W + scale L A in W's own precision: one `addmm_`, nothing of W's shape is made."""
    dtype = weight_MN.dtype
    weight_MN.addmm_(left_MR.to(dtype), right_RN.to(dtype), beta=keep, alpha=scale)


def merge_stochastically(
    weight_MN: Tensor, left_MR: Tensor, right_RN: Tensor, keep: float, scale: float, *key: int | str
) -> None:
    """The same for bfloat16, computed in float32 and rounded stochastically, by blocks of rows.

    Changes far below a weight's precision so have their effect in expectation. The random bits are a function of `key`
    and an element's place.
    """
    (rows, width), seed = weight_MN.shape, hash_key("rounding", *key)
    step = max(1, _BLOCK // width)
    for start in range(0, rows, step):
        block = weight_MN[start : start + step].float()
        block.addmm_(left_MR[start : start + step].float(), right_RN.float(), beta=keep, alpha=scale)
        places = torch.arange(start * width, start * width + block.numel(), device=block.device).view_as(block)
        weight_MN[start : start + step] = round_stochastically(block, hash_words(seed, places))


def round_stochastically(values: Tensor, words: Tensor) -> Tensor:
    """Return float32 values as bfloat16, up or down with the probabilities that keep the mean.

    A float32 is a bfloat16 with 16 more bits of mantissa: adding 16 random bits, those of `words`, and cutting them off
    carries as often as the cut bits demand. Values that are not finite stay as they are.
    """
    random = (words & 0xFFFF).int()
    rounded = ((values.view(torch.int32) + random) & -0x10000).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max  # beyond it there is no neighbour to round to
    rounded = rounded.clamp(-largest, largest)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def sampled(weight: Tensor) -> Tensor:
    """Return a copy of up to 65536 weights of a matrix: the first columns of evenly spaced rows, all if it is small."""
    matrix = torch.atleast_2d(weight.detach())[:, :_SAMPLE]
    rows = max(1, _SAMPLE // max(1, matrix.shape[1]))
    return matrix[:: -(-len(matrix) // rows) or 1].clone()


def squared_norm(weight: Tensor) -> Tensor:
    """Return ||W||_F^2, 0-d float64, by blocks in float32 at least: neither overflow nor a copy of W."""
    rows = max(1, _BLOCK // max(1, weight[0].numel()))
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.stack([block.to(wide).square().sum().double() for block in weight.detach().split(rows)]).sum()


class Moved:
    """Counts the stored weights that an update moved, on a sample of each matrix.

    before = sampled(weight)
    weight.add_(change)
    moved.count(weight, before)
    moved.share()
    """

    def __init__(self) -> None:
        self._moved: list[Tensor] = []
        self._numel = 0

    def count(self, weight: Tensor, before: Tensor) -> None:
        """Count what differs from an earlier sample, weighted by the size of the matrix."""
        self._moved.append((sampled(weight) != before).double().mean() * weight.numel())
        self._numel += weight.numel()

    def share(self) -> float:
        """Return the share of the weights that moved, 0 to 1; NaN if none was looked at."""
        if not self._numel:
            return float("nan")
        place = self._moved[0].device  # the sum is made there, and the host waits once
        return float(torch.stack([moved.to(place) for moved in self._moved]).sum()) / self._numel
