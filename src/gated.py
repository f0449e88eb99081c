"""Gated feed-forward layers that keep less for backward.

Legend: T tokens (all leading axes), F intermediate width.

y = down(silu(g) * u) with g = gate(x) and u = up(x), both (T, F). Autograd keeps g, silu(g) and u: of a layer whose
inputs are not kept (a sketched one) a fifth of all that backward needs. Here silu(g) is computed again; values and
gradients are the same to the bit. The scheme is that of Liger Kernel's SiLUMul (arXiv 2410.10989), which runs on GPUs.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _SiluMul(torch.autograd.Function):
    """The product silu(gate) * up, which is given, with gradients for gate and up; all (T, F)."""

    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, product_TF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return product_TF.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_TF,) = grads
        gate_TF, up_TF = ctx.saved_tensors
        grad_gate_TF = grad_TF * up_TF
        del up_TF  # in a layer that was computed again nobody else holds it
        torch.ops.aten.silu_backward.grad_input(grad_gate_TF, gate_TF, grad_input=grad_gate_TF)
        return grad_gate_TF, F.silu(gate_TF).mul_(grad_TF), None


def _forward(self: Any, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # forward-mode derivatives have no such graph
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    gate_TF, up_TF = self.gate_proj(x), self.up_proj(x)
    # Taken out here, where gradients are recorded: for the ledger it is an activation if down_proj keeps it.
    product_TF = F.silu(gate_TF.detach()).mul_(up_TF.detach())
    product_TF = _SiluMul.apply(gate_TF, up_TF, product_TF)
    del gate_TF, up_TF
    return self.down_proj(product_TF)  # type: ignore[no-any-return]


def keep_gates_only(model: nn.Module) -> None:
    """Let each SwiGLU layer keep gate and up alone; a layer that computes anything else stays as it is."""
    from transformers.activations import SiLUActivation
    from transformers.models.llama.modeling_llama import LlamaMLP

    known = LlamaMLP.forward.__code__
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)  # of Llama, Mistral, Qwen, ...: all wrote it alike
        if code is None or (code.co_code, code.co_names) != (known.co_code, known.co_names):
            continue
        if isinstance(module.act_fn, SiLUActivation | nn.SiLU) and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
