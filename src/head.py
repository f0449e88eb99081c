"""The product of a language model's head, which on a CPU is taken by parts of the vocabulary.

Legend: T tokens, D width of the states, V vocabulary.

X W^T of few tokens and a large vocabulary makes the matrix library copy the whole W into its own layout, which takes as
long as the product. Parts of W stay in the cache. `python -m src.bench head` has both: chunks, and chunks_at_once.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

# Rows of the head's weight that are multiplied at a time.
PART = 1024


def head_product(head: nn.Module, states_TD: Tensor) -> Tensor:
    """Return head(states), (T, V). By parts where that is faster and the head is a matrix and nothing more."""
    plain = not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    if states_TD.device.type != "cpu" or not plain or not _is_matrix(head) or len(cast(Tensor, head.weight)) <= PART:
        return cast(Tensor, head(states_TD))
    return cast(Tensor, _Product.apply(states_TD, head.weight))


def _is_matrix(head: nn.Module) -> bool:
    """Tell a linear layer without bias, to whose forward and backward nobody has added anything."""
    hooks = head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks
    added = any(hooks) or "forward" in vars(head) or _has_any_global_hook()
    return type(head) is nn.Linear and head.bias is None and not added


def _by_parts(states_TD: Tensor, weight_VD: Tensor) -> Tensor:
    logits_TV = states_TD.new_empty(len(states_TD), len(weight_VD))
    for part_DV, part_TV in zip(weight_VD.T.split(PART, 1), logits_TV.split(PART, 1), strict=True):
        torch.mm(states_TD, part_DV, out=part_TV)
    return logits_TV


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(states_TD: Tensor, weight_VD: Tensor) -> Tensor:
        return _by_parts(states_TD, weight_VD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        states_TD, weight_VD = inputs
        ctx.save_for_backward(states_TD if weight_VD.requires_grad else None, weight_VD)
        ctx.save_for_forward(weight_VD)
        ctx.set_materialize_grads(False)  # no zeros for a weight without a tangent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_TV,) = grads
        states_TD, weight_VD = ctx.saved_tensors
        if grad_TV is None:
            return None, None
        grad_TD = grad_TV @ weight_VD if ctx.needs_input_grad[0] else None
        return grad_TD, None if states_TD is None else grad_TV.T @ states_TD

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        states_TD, weight_VD = tangents
        assert states_TD is not None and weight_VD is None, "the head's own tangent comes by a hook"
        (known_VD,) = ctx.saved_tensors
        # Where gradients are recorded the tangent has a history too, and no product into a given tensor has one.
        return states_TD @ known_VD.T if torch.is_grad_enabled() else _by_parts(states_TD, known_VD)
