"""From sketches to factors of an update: directions D (M, R) in sketch space, and the two-sided reconstruction.

Legend: M output width, N input width, R rank, L co-rank.
"""

import math

import torch
from torch import Tensor


def reconstruct(sketch_MR: Tensor, co_sketch_LN: Tensor, co_projection_LM: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left (M, R), right (R, N)) whose product is the two-sided estimate of G from Y = G A^T and Z = B G.

        estimate = Q (B Q)^+ Z,   Q = orth(Y)       (one-pass sketch: Tropp, Yurtsever, Udell and Cevher, SIAM J. Matrix
                                                    Anal. Appl. 38 (2017), algorithm 4; arXiv 1609.00048)

    It is biased; its error is that of the best estimate of a rank somewhat below R, small where G's singular values
    fall quickly. The factors are those of its QR decomposition from the right, with right right^T = (N / R) I as for a
    projection A, so that `left` has the meaning of a sketch: its rows' norms are, but for one factor, the estimate's.
    """
    q_MR, upper_RR = torch.linalg.qr(sketch_MR)
    sizes_R = upper_RR.diagonal().abs()
    found_R = sizes_R > sizes_R.max() * torch.finfo(sizes_R.dtype).eps * max(sketch_MR.shape)
    # A column beyond Y's rank, and a row without a gradient, would be round-off that RowAdam blows up to a full step.
    q_MR = torch.where(found_R & (sketch_MR != 0).any(1, keepdim=True), q_MR, 0.0)
    core_RN = torch.linalg.pinv(co_projection_LM @ q_MR) @ co_sketch_LN
    right_NR, lower_RR = torch.linalg.qr(core_RN.T)
    scale = (core_RN.shape[1] / core_RN.shape[0]) ** 0.5
    return q_MR @ lower_RR.T / scale, right_NR.T * scale


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


def adam(
    sketch_MR: Tensor, first_MR: Tensor, second_MR: Tensor, step: int, beta1: float, beta2: float, eps: float
) -> Tensor:
    """Return Adam's direction for a sketch as if it were a gradient, and update both moments in place.

        m <- beta1 m + (1 - beta1) S        v <- beta2 v + (1 - beta2) S^2
        D = m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps)

    The moments belong to a projection: while it is kept this is Adam on LoRA's B with a frozen A, from 0, merged; at a
    redraw they have to be reset or transferred.
    """
    first_MR.lerp_(sketch_MR, 1.0 - beta1)
    second_MR.lerp_(sketch_MR.square(), 1.0 - beta2)
    root_MR = (second_MR / (1.0 - beta2**step)).sqrt_().add_(eps)
    return (first_MR / (1.0 - beta1**step)).div_(root_MR)


def transfer(first_MR: Tensor, second_MR: Tensor, old_RN: Tensor, new_RN: Tensor) -> None:
    """Carry Adam's moments over a redraw, in place: m <- m A_old A_new^T (arXiv 2402.03293), v <- its rows' means.

    The first is unbiased for the sketch of the decoded momentum m A_old. An entry of v belongs to a column that is no
    more; what stays is the row's mean square, which the next draw's entries have as well.
    """
    first_MR.copy_(first_MR @ (old_RN @ new_RN.T))
    second_MR.copy_(second_MR.mean(-1, keepdim=True).expand_as(second_MR))


def check_transfer(beta1: float, every: int, rank: int, width: int) -> None:
    """Refuse transfers that feed on themselves.

    Each multiplies the energy of the decoded momentum by 1 + (N - 1) / R in expectation, and the K updates between two
    shrink it by beta1^(2 K): it grows without bound where beta1^K >= sqrt(R / (R + N - 1)).

    Raises:
        ValueError: in one sentence.
    """
    bound = (rank / (rank + width - 1)) ** 0.5
    if beta1**every >= bound:
        least = math.floor(math.log(bound) / math.log(beta1)) + 1
        raise ValueError(
            f"moments=transfer with refresh_every={every}, beta1={beta1:g}, rank {rank} and an input width of {width} "
            f"lets the momentum grow at every redraw: {beta1:g}^{every} >= sqrt(R / (R + N - 1)) = {bound:.3f}. Use "
            f"refresh_every={least} or more, a smaller beta1, or moments=reset."
        )
