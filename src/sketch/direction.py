"""Directions in sketch space: D (M, R) from a sketch S (M, R)."""

import torch
from torch import Tensor


def row_adam(sketch_MR: Tensor, second_moment_M: Tensor, step: int, beta2: float = 0.95, eps: float = 1e-8) -> Tensor:
    """Return the RowAdam direction and update its second moment in place.

        v_i <- beta2 v_i + (1 - beta2) mean_j S_ij^2        D_i = S_i / (sqrt(v_i / (1 - beta2^step)) + eps)

    One moment an output row of W, so that it survives a redrawn projection; no first moment (arXiv 2610.06647). At the
    first step a row's root mean square is 1: the size of D A, sqrt(M N) for a rank-R Rademacher A in expectation, does
    not shrink with the gradient, and of the part of it that lies along the gradient sqrt(R / (R + N)) grows with R.

    Args:
        sketch_MR: S; not changed.
        second_moment_M: v, changed in place; zeros at the start.
        step: 1 at the first update.
    """
    second_moment_M.lerp_(sketch_MR.square().mean(-1), 1.0 - beta2)
    scale_M = (second_moment_M / (1.0 - beta2**step)).sqrt_().add_(eps)
    return sketch_MR / scale_M[:, None]


def second_moment_like(sketch_MR: Tensor) -> Tensor:
    """Return RowAdam's state at the start, zeros (M,)."""
    return torch.zeros(sketch_MR.shape[0], dtype=sketch_MR.dtype, device=sketch_MR.device)
