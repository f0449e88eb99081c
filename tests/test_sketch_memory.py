"""Nothing as large as a target's weight is made in any part of an update; the bytes kept are those reported."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.divergence import predict
from src.sketch import merge
from src.sketch.layer import SketchedLayers
from src.sketch.optimizer import SketchOptimizer
from src.sketch.projection import FAMILIES
from tests.test_sketch import build, loss_of, sketched
from tests.tinymodels import PROJECTIONS, llama, tokens

RANK, WIDTH, INNER = 8, 300, 320


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(merge, "_BLOCK", 1 << 16)


def held(optimizer: SketchOptimizer) -> dict[str, int]:
    """The bytes of an optimizer's tensors by component, each storage once."""
    return {
        name: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for name, tensors in optimizer.memory().items()
    }


class Largest(TorchDispatchMode):
    """Keeps the size and the operator of the largest output that shares no storage with the given tensors."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.numel, self.what = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor) or leaf._is_zerotensor():  # forward mode's zeros have no memory
                continue
            storage = leaf.untyped_storage()
            numel = min(
                leaf.numel(), storage.nbytes() // leaf.itemsize
            )  # an expanded tensor is as small as its storage
            if numel > self.numel and storage.data_ptr() not in self.known:
                self.numel, self.what = numel, f"{func} {tuple(leaf.shape)} {leaf.dtype}"
        return out


def wide(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A decoder layer whose smallest target has 90000 weights, and a batch whose activations have 3200 elements."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 5, "num_key_value_heads": 5}
    model = llama(dtype, num_hidden_layers=1, initializer_range=0.05, **sizes)
    return model, tokens(2, 5, 29)


def smallest(layers: SketchedLayers) -> int:
    return min(module.weight.numel() for module in layers.modules.values())


def kept(model: nn.Module, optimizer: SketchOptimizer) -> list[Tensor]:
    masters = [state["master"] for state in optimizer.state.values() if "master" in state]
    return [*model.parameters(), *masters]


def one_update(model: nn.Module, optimizer: SketchOptimizer, batch: Tensor, outside_clip: bool = False) -> Largest:
    """Forward, backward, clip, propose, probe, apply and redraw, all of them watched."""
    with Largest(kept(model, optimizer)) as watch:
        loss_of(model, batch).backward()
        if outside_clip:
            torch.nn.utils.clip_grad_norm_(optimizer.layers.sketch_parameters(), 1e-3)
        optimizer.propose()
        predict(lambda: model(batch).logits[:, -1], lambda logits: [logits], optimizer.tangents())
        optimizer.apply(0.5)
    return watch


def check(watch: Largest, layers: SketchedLayers) -> None:
    assert watch.numel < smallest(layers), watch.what
    assert watch.numel >= RANK * INNER  # it did look


@pytest.mark.parametrize("clip_norm", ["sketch", "estimate", "none", "outside"])
@pytest.mark.parametrize("direction", ["sgd", "row_adam"])
def test_an_update_makes_nothing_dense(direction, clip_norm):
    """Two updates, so that the second begins with state; weight decay and both of the paper's scalings are on."""
    model, batch = wide()
    layers = sketched(model, PROJECTIONS, RANK)
    outside = clip_norm == "outside"
    norm = "none" if outside else clip_norm
    options: dict[str, Any] = {"clip_norm": norm, "max_grad_norm": 1e-3, "weight_decay": 0.1, "preserve_norm": True}
    optimizer = SketchOptimizer(layers, 1e-3, direction, lr_is="ratio", **options)
    for _ in range(2):
        check(one_update(model, optimizer, batch, outside), layers)
    assert layers.draw == 2
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("projection", list(FAMILIES))
def test_no_projection_makes_anything_dense(projection):
    """Their draw included: gaussian and stiefel's float64, srht's parities."""
    model, batch = wide()
    layers = sketched(model, PROJECTIONS, RANK, projection=projection)
    check(one_update(model, SketchOptimizer(layers, 1e-3), batch), layers)
    assert layers.draw == 1


@pytest.mark.parametrize("moments", ["reset", "transfer"])
def test_moments_over_a_redraw_make_nothing_dense(moments):
    model, batch = wide()
    layers = sketched(model, PROJECTIONS, RANK)
    optimizer = SketchOptimizer(layers, 1e-3, "adam", beta1=0.1, moments=moments)
    for _ in range(2):
        check(one_update(model, optimizer, batch), layers)
    assert layers.draw == 2


def test_the_two_sided_estimate_makes_nothing_dense():
    model, batch = wide()
    layers = sketched(model, PROJECTIONS, RANK, co_rank=2 * RANK)
    optimizer = SketchOptimizer(layers, 1e-3, "sgd", clip_norm="estimate", weight_decay=0.1)
    for _ in range(2):
        check(one_update(model, optimizer, batch), layers)


@pytest.mark.parametrize("storage", ["master", "stochastic", "plain"])
def test_bfloat16_weights_make_nothing_dense(storage):
    """Beside the masters, which are there from the start, nothing float32 of a weight's size; stochastic: blocks."""
    model, batch = wide(torch.bfloat16)
    layers = sketched(model, PROJECTIONS, RANK)
    optimizer = SketchOptimizer(layers, 1e-3, storage=storage, weight_decay=0.1)
    places = {tensor.data_ptr() for tensor in kept(model, optimizer)}
    for _ in range(2):
        watch = one_update(model, optimizer, batch)
        check(watch, layers)
        assert watch.numel <= max(merge._BLOCK, merge._SAMPLE) < smallest(layers), watch.what
    assert {tensor.data_ptr() for tensor in kept(model, optimizer)} == places  # updated where they are


def test_the_watch_sees_a_dense_gradient():
    """Without sketches the same model's backward makes the gradients, and a dense merge makes the change."""
    model, batch = wide()
    layers = sketched(model, PROJECTIONS, RANK)
    layers.remove()
    model.requires_grad_(True)
    with Largest(list(model.parameters())) as watch:
        loss_of(model, batch).backward()
    assert watch.numel >= WIDTH * INNER
    weight = layers.modules["model.layers.0.self_attn.q_proj"].weight.detach()
    left, right = torch.zeros(WIDTH, RANK), torch.zeros(RANK, WIDTH)
    with Largest([weight]) as watch:
        weight.add_(left @ right)
    assert watch.numel == WIDTH * WIDTH
    with Largest([weight]) as watch:
        weight.addmm_(left, right)
    assert watch.numel == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["sgd", "row_adam", "adam"])
def test_the_bytes_at_four_moments(dtype, direction):
    """By hand from the shapes: start, after backward, after propose, after apply."""
    model, patterns, batch = build("llama", dtype)
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 1e-3, direction, clip_norm="estimate")
    modules = layers.modules.values()
    numels = [module.out_features * layers.rank for module in modules]
    # A base each for the widths 24 and 44; a byte of sign a column for attention, MLP and down_proj of two layers.
    projections = 4 * layers.rank * (24 + 44) + 2 * (24 + 24 + 44)
    masters = 4 * sum(module.weight.numel() for module in modules) if dtype == torch.bfloat16 else 0
    moments = {"sgd": 0, "row_adam": 4 * sum(m.out_features for m in modules), "adam": 2 * 4 * sum(numels)}[direction]
    expected = {"sketches": 0, "projections": projections, "optimizer_state": 0, "master_weights": masters}
    assert held(optimizer) == expected
    loss_of(model, batch).backward()
    expected["sketches"] = 4 * sum(numels)
    assert held(optimizer) == expected
    optimizer.propose()
    expected |= {
        "sketches": 4 * sum(numels),
        "optimizer_state": moments,
    }  # sketches: the directions
    assert held(optimizer) == expected
    optimizer.apply(1.0)
    expected |= {"sketches": 0}
    assert held(optimizer) == expected


def test_the_bytes_of_the_two_sided_sketch():
    """Y and Z in backward, both factors of the estimate after propose; B is a base a height and signs a layer."""
    model, patterns, batch = build("llama", torch.float32)
    layers = sketched(model, patterns, co_rank=6)
    optimizer = SketchOptimizer(layers, 1e-3, "sgd")
    modules = layers.modules.values()
    heights = [module.out_features for module in modules]
    projections = 4 * layers.rank * (24 + 44) + 2 * (24 + 24 + 44)
    projections += 4 * 6 * sum(set(heights)) + sum(heights)
    loss_of(model, batch).backward()
    found = held(optimizer)
    assert found["projections"] == projections
    assert found["sketches"] == 4 * sum(layers.rank * m.out_features + 6 * m.in_features for m in modules)
    optimizer.propose()
    assert held(optimizer)["sketches"] == 4 * sum(layers.rank * (m.out_features + m.in_features) for m in modules)
    optimizer.apply(1.0)
    assert held(optimizer)["sketches"] == 0


def test_a_parameter_that_holds_a_sketch_takes_no_memory():
    """It has stride 0: one number, whatever (M, R) is; its gradient is a tensor of its own."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns, co_rank=6)
    for parameter in layers.sketch_parameters():
        assert parameter.untyped_storage().nbytes() == 8 and parameter.numel() > 1
    loss_of(model, batch).backward()
    places = set()
    for parameter in layers.sketch_parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == 8 * parameter.numel()
        places.add(parameter.grad.data_ptr())
    assert len(places) == 4
