"""Divergence of the next-token distribution under a proposed update: predicted before it, realised after it.

Legend: T response positions, V vocabulary.

Per position KL(old || new) = 1/2 Var_p(u) + O(|u|^3), u = dlogits / temperature the change of the logits to first
order (a forward-mode derivative along the displacement) and p the old distribution; its mean over positions is the
quadratic form of the Fisher matrix. Scaling the displacement by a scales the prediction by a^2.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Positions whose distributions are held in float64 at a time.
_CHUNK = 64


def kl_from_tangent(logits_TV: Tensor, tangent_TV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return 1/2 Var_p(tangent / temperature) per position, p = softmax(logits / temperature); (T,) float64."""

    def chunk(logits: Tensor, tangent: Tensor) -> Tensor:
        probs = torch.softmax(logits.double() / temperature, -1)
        change = tangent.double() / temperature
        mean = (probs * change).sum(-1, keepdim=True)
        return 0.5 * (probs * (change - mean).square()).sum(-1)

    return _by_chunks(chunk, logits_TV, tangent_TV)


def kl(old_logits_TV: Tensor, new_logits_TV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(softmax(old / temperature) || softmax(new / temperature)) per position, (T,) float64."""

    def chunk(old: Tensor, new: Tensor) -> Tensor:
        old_logp = torch.log_softmax(old.double() / temperature, -1)
        new_logp = torch.log_softmax(new.double() / temperature, -1)
        return (old_logp.exp() * (old_logp - new_logp)).sum(-1)

    return _by_chunks(chunk, old_logits_TV, new_logits_TV)


def _by_chunks(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    pairs = zip(first.split(_CHUNK), second.split(_CHUNK), strict=True)
    return torch.cat([function(*pair) for pair in pairs])


@torch.no_grad()
def predict(
    states: Callable[[], Tensor],
    logits: Callable[[Tensor], Iterable[Tensor]],
    tangents: AbstractContextManager[object],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (states (T, D), predicted divergence at each position (T,) float64) of a displacement.

    Args:
        states: computes the states of the probe's positions.
        logits: makes logits (t, V) from states, some positions at a time.
        tangents: a context that makes the model's layers carry the displacement, e.g. `SketchOptimizer.tangents()`.

    Raises:
        RuntimeError: no layer carried a tangent, so the displacement never reached the logits.

    Note: attention must be eager or torch's scaled_dot_product_attention, which is switched to its composite ("math")
    kernel here: the fused kernels have no forward-mode derivative.
    """
    with fwad.dual_level(), tangents, sdpa_kernel(SDPBackend.MATH):
        dual_TD = states()
        predicted = []
        for dual_TV in logits(dual_TD):
            primal_TV, tangent_TV = fwad.unpack_dual(dual_TV)
            if tangent_TV is None:
                raise RuntimeError("the proposed update does not reach the logits: no target layer lies on their path")
            predicted.append(kl_from_tangent(primal_TV, tangent_TV, temperature))
        # A tensor must not keep its tangent beyond the level.
        return fwad.unpack_dual(dual_TD).primal.clone(), torch.cat(predicted)
