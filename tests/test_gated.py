"""SwiGLU layers that keep gate and up alone: values and gradients to the bit, and what is kept."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from src.gated import keep_gates_only
from src.memory import saved_for_backward
from tests.tinymodels import llama


def gradients(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    tokens = torch.arange(3, 15).repeat(4, 1)
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(grad.dtype == dtype for grad in found)
    return [logits.detach(), *found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_are_the_same_to_the_bit(dtype):
    model = llama(dtype)
    lean = deepcopy(model)
    keep_gates_only(lean)
    keep_gates_only(lean)  # once more changes nothing
    for ours, theirs in zip(gradients(lean, dtype), gradients(model, dtype), strict=True):
        assert torch.equal(ours, theirs)


def test_a_third_of_what_the_layer_keeps_is_gone():
    """Frozen weights: gate and up, without silu(gate). A copy of the model is lean by itself, not by its original."""
    sizes = []
    for lean in (False, True):
        model = llama(intermediate_size=480).requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(True)
        if lean:
            keep_gates_only(model)
            original, model = model, deepcopy(model)
            original.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
        with saved_for_backward(model) as saved:
            gradients(model, torch.float32)
        sizes.append(max(saved))
        assert torch.isfinite(model.get_input_embeddings().weight.grad).all()
    gate = 2 * 48 * 480 * 4  # of both layers
    assert sizes[0] - sizes[1] == gate and sizes[0] > 3 * gate


def test_another_activation_or_another_forward_is_left_alone():
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    gelu, other = llama(hidden_act="gelu"), Other()
    keep_gates_only(gelu)
    keep_gates_only(other)
    assert "forward" not in vars(gelu.model.layers[0].mlp) and "forward" not in vars(other)


def test_a_second_derivative_is_refused():
    model = llama()
    model.set_attn_implementation("eager")
    keep_gates_only(model)
    tokens = torch.arange(3, 15)[None]
    weight = model.get_input_embeddings().weight
    (first,) = torch.autograd.grad(model(input_ids=tokens).logits.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()
