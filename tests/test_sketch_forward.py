"""What a sketched layer keeps, and when: before its product, of the input that it really reads."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from src.sketch.layer import SketchedLayers, select_targets

RANK, IN, HIDDEN, OUT, ROWS = 3, 20, 40, 24, 7


def block(dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, SketchedLayers]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).to(dtype)
    return model, SketchedLayers(model, select_targets(model, ["0", "2"]), RANK, seed=5)


def flops(run: object) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()  # type: ignore[operator]
    return counter.get_total_flops()


def test_a_block_that_is_computed_again_spares_its_last_product():
    """All that backward needs is there before it; with the product and P of the last layer first, it would be taken."""
    model, layers = block()
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    forward = flops(lambda: model(x))
    plain = flops(lambda: model(x).sum().backward())
    again = flops(lambda: checkpoint(model, x, use_reentrant=False).sum().backward())
    assert again - plain == forward - 2 * ROWS * HIDDEN * OUT
    assert all(parameter.grad is not None for parameter in layers.parameters.values())


@pytest.mark.parametrize("change", [lambda module, args: (args[0] * 3,), lambda module, args: (args[0].mul_(3),)])
def test_an_input_that_another_hook_changes_is_the_one_that_counts(change):
    model, layers = block()
    model[1] = nn.Identity()  # a Tanh would miss its output, were it changed in place
    model[2].register_forward_pre_hook(change)
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(args[0].detach()))
    x = torch.randn(ROWS, IN, dtype=torch.float64)
    model(x).sum().backward()
    expected = torch.ones(OUT, ROWS, dtype=torch.float64) @ (seen[0] @ layers.projection("2").T)
    torch.testing.assert_close(layers.parameters["2"].grad, expected)


def test_a_forward_that_fails_leaves_no_trace():
    model, layers = block()
    with pytest.raises(RuntimeError):
        model[0](torch.randn(ROWS, IN + 1, dtype=torch.float64))
    x = torch.randn(ROWS, IN, dtype=torch.float64)
    model(x).sum().backward()
    found = layers.parameters["0"].grad
    assert found is not None
    again, fresh = block()
    again(x).sum().backward()
    assert torch.equal(found, fresh.parameters["0"].grad)


def test_the_layers_output_may_be_changed_in_place():
    model, layers = block()
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    model[0](x).relu_().sum().backward()
    mask = (x @ model[0].weight.T + model[0].bias > 0).double()
    torch.testing.assert_close(layers.parameters["0"].grad, mask.T @ (x @ layers.projection("0").T))
    torch.testing.assert_close(x.grad, mask @ model[0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_a_sketch_is_taken_in_the_layers_precision(dtype):
    """float64 is not narrowed; what comes back to a float32 layer is bfloat16, and so is the product with P."""
    model, layers = block(dtype)
    x = torch.randn(ROWS, IN, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        y.float().sum().backward()
        projected = x @ layers.projection("0").to(dtype).T
    assert y.dtype == (torch.bfloat16 if dtype == torch.float32 else torch.float64)
    assert projected.dtype == y.dtype
    for parameter in layers.parameters.values():
        assert parameter.grad is not None and parameter.grad.dtype == dtype and parameter.grad.isfinite().all()
