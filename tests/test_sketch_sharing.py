"""An X that several layers read is projected once, and the sketches are right however a model is run."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.optimizer import SketchOptimizer
from tests.test_sketch import assert_all_close, build, dense_gradients, loss_of, sketched, sketches, weights
from tests.tinymodels import llama, tokens

Loss = Callable[[nn.Module], Tensor]


class Products(TorchDispatchMode):
    """Counts the matrix products whose result is (tokens, rank)."""

    def __init__(self, tokens: int, rank: int):
        super().__init__()
        self.shape = (tokens, rank)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.count += out.shape[-1] == self.shape[1] and out.numel() == self.shape[0] * self.shape[1]
        return out


class Siblings(nn.Module):
    """Two layers of one parent and one width."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 5)
        self.b = nn.Linear(12, 6)


class Calling(nn.Module):
    """Siblings whose use is a function of (siblings, x)."""

    def __init__(self, use: Callable[[Siblings, Tensor], Tensor]):
        super().__init__()
        self.block = Siblings()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.block, x)


def calling(use: Callable[[Siblings, Tensor], Tensor]) -> Calling:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Calling(use).double()


def inputs(seed: int = 0, rows: int = 7) -> Tensor:
    return torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(layers: SketchedLayers, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient @ layers.projection(name).T for name, gradient in gradients.items()}


def gradients_of(model: nn.Module, patterns: list[str], loss: Loss) -> dict[str, Tensor]:
    """Autograd's weight gradients of the targets for a loss, from a copy without sketches."""
    copy = deepcopy(model).requires_grad_(True)
    loss(copy).backward()
    return {name: module.weight.grad for name, module in select_targets(copy, patterns).items()}


def check(model: nn.Module, patterns: list[str], loss: Loss, reference: nn.Module | None = None) -> SketchedLayers:
    """Sketch the model and compare with the dense gradients of the reference (a copy of the model by default)."""
    gradients = gradients_of(reference or model, patterns, loss)
    layers = sketched(model, patterns)
    loss(model).backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)
    return layers


def test_one_projection_for_q_k_v_and_one_for_gate_up():
    """A decoder layer of seven targets makes four products X A^T (q k v, o, gate up, down), backward none."""
    model, patterns, batch = build("llama")
    layers = sketched(model, patterns, rank=5)
    with Products(batch.numel(), 5) as products:
        loss = loss_of(model, batch)
    assert products.count == 2 * 4
    with Products(batch.numel(), 5) as products:
        loss.backward()
    assert products.count == 0
    assert_all_close(sketches(layers), expected(layers, dense_gradients(model, patterns, batch)), 1e-12)


def test_equal_inputs_that_are_not_one_tensor_are_projected_apart():
    """The count above can be another: it is the tensor that is known again, not its values."""
    model = calling(lambda block, x: block.a(x).sum() + block.b(x + 0.0).sum())
    sketched(model, ["a", "b"])
    with Products(7, 4) as products:
        model(inputs())
    assert products.count == 2


def checkpointed(model: nn.Module, how: str, reentrant: bool) -> None:
    model.config.use_cache = False  # a cache of keys would grow in the recomputation
    if how == "transformers":
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.train()  # transformers checkpoints in training mode only; this model has no dropout
    else:
        for block in model.model.layers:
            block.forward = _through_checkpoint(block.forward, reentrant)
    if reentrant:
        model.enable_input_require_grads()


def _through_checkpoint(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def through(hidden: Tensor, **kwargs: Any) -> Any:
        return checkpoint(lambda x: forward(x, **kwargs), hidden, use_reentrant=reentrant)

    return through


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["transformers", "torch"])
def test_checkpointing_of_either_kind(how, reentrant, parts):
    model, patterns, batch = build("llama")
    gradients = dense_gradients(model, patterns, batch)
    layers = sketched(model, patterns, rank=5)
    checkpointed(model, how, reentrant)
    with Products(batch.numel() // parts, 5) as products:
        for microbatch in batch.chunk(parts):
            loss_of(model, microbatch).backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)
    if reentrant:  # the first forward is one without gradients
        assert products.count == 8 * parts
    else:  # the recomputation of a block ends as soon as what it saved is there
        assert 8 * parts < products.count <= 16 * parts


def test_an_input_by_keyword():
    model = calling(lambda block, x: block.a(input=x).square().sum() + block.b(input=x).square().sum())
    layers = check(model, ["a", "b"], lambda m: m(inputs()))
    for parameter in layers.parameters.values():
        parameter.grad = None
    with Products(7, 4) as products:
        model(inputs())
    assert products.count == 1


@pytest.mark.parametrize("same", [True, False])
def test_a_layer_called_twice_in_a_forward(same):
    """With the same tensor or another, and a sibling in between."""

    def use(block: Siblings, x: Tensor) -> Tensor:
        other = x if same else x.cos()
        return block.a(x).square().sum() + block.b(x).pow(3).sum() + block.a(other).exp().sum()

    check(calling(use), ["a", "b"], lambda m: m(inputs()))


def test_an_input_changed_in_place_between_two_siblings_is_projected_again():
    def use(block: Siblings, x: Tensor, inplace: bool) -> Tensor:
        x = x.clone()
        first = block.a(x).square().sum()
        x = x.mul_(-3.0) if inplace else x * -3.0
        return first + block.b(x).square().sum()

    model = calling(lambda block, x: use(block, x, True))
    reference = calling(lambda block, x: use(block, x, False))  # dense autograd needs the first x
    check(model, ["a", "b"], lambda m: m(inputs()), reference)


@pytest.mark.parametrize("change", ["data", "numpy"])
def test_an_input_buffer_that_is_filled_anew_behind_autograds_back(change):
    """A buffer that outlives its forward: `.data` and numpy change it without a new version."""
    model = calling(lambda block, x: block.a(x).square().sum() + block.b(x).square().sum())
    layers = sketched(model, ["a", "b"])
    buffer = inputs()
    model(buffer).backward()
    for parameter in layers.parameters.values():
        parameter.grad = None
    version = buffer._version
    if change == "data":
        buffer.data.copy_(inputs(1))
    else:
        buffer.numpy()[:] = inputs(1).numpy()
    assert buffer._version == version
    model(buffer).backward()
    gradients = gradients_of(calling(model.use), ["a", "b"], lambda m: m(inputs(1)))
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)


def test_memory_that_is_used_again_is_another_input():
    """Never by address: a freed X's place, and the place of its Python object, go to the next X of the same shape."""
    model = calling(lambda block, x: block.a(x).square().sum() + block.b(x).square().sum())
    gradients = [gradients_of(model, ["a", "b"], lambda m, s=seed: m(inputs(s))) for seed in range(6)]
    layers = sketched(model, ["a", "b"])
    places = []
    for seed in range(6):
        x = inputs(seed)
        places.append((x.data_ptr(), x._version))
        model(x).backward()
        assert_all_close(sketches(layers), expected(layers, gradients[seed]), 1e-12)
        for parameter in layers.parameters.values():
            parameter.grad = None
        del x
    assert len(set(places)) < 6  # so some place was indeed used again


def test_inference_tensors_as_inputs():
    """They have no version to compare."""
    model = calling(lambda block, x: block.a(x).square().sum() + block.b(x).square().sum())
    gradients = gradients_of(model, ["a", "b"], lambda m: m(inputs()))
    layers = sketched(model, ["a", "b"])
    with torch.inference_mode():
        x = inputs()
    assert x.is_inference()
    model(x).backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)


def test_autocast_to_bfloat16():
    """The products are bfloat16, the sums float32; the error is bfloat16's, and X is projected once as before."""
    model, patterns, batch = build("llama", torch.float32)
    gradients = dense_gradients(deepcopy(model).double(), patterns, batch)
    layers = sketched(model, patterns, rank=5)
    with Products(batch.numel(), 5) as products, torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    assert products.count == 8
    loss.backward()
    assert {sketch.dtype for sketch in sketches(layers).values()} == {torch.float32}
    found = {name: sketch.double() for name, sketch in sketches(layers).items()}
    exact = {name: gradient @ layers.projection(name).double().T for name, gradient in gradients.items()}
    assert_all_close(found, exact, 0.05)


# torch's own, from the compiler's look at any autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_right_and_is_not_compiled_again_at_a_redraw():
    model, patterns, _ = build("mlp")
    reference = deepcopy(model)
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for draw in range(5):
        assert layers.draw == draw
        batch = tokens(4, 7, 17, seed=draw)
        loss_of(compiled, batch).backward()
        gradients = dense_gradients(reference, patterns, batch)
        assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)
        optimizer.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


def test_an_activation_in_place_after_a_layer():
    def net(inplace: bool) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            parts = [nn.Linear(12, 12), nn.ReLU(inplace), nn.Linear(12, 12), nn.ReLU(inplace), nn.Linear(12, 3)]
            return nn.Sequential(*parts).double()

    check(net(True), ["0", "2", "4"], lambda m: m(inputs()).square().sum(), net(False))


def test_backward_passes_add_up_until_the_step():
    """Different losses, and one graph backwarded twice (which counts twice, as torch's `.grad` does)."""
    model = calling(lambda block, x: block.a(x).square().sum() + block.b(x).square().sum())

    def loss(m: nn.Module) -> Tensor:
        return m(inputs(0)) + 2.0 * m(inputs(1)) + m(inputs(2))

    gradients = gradients_of(model, ["a", "b"], loss)
    layers = sketched(model, ["a", "b"])
    model(inputs(0)).backward()
    twice = model(inputs(1))
    twice.backward(retain_graph=True)
    twice.backward()
    model(inputs(2)).backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)


@pytest.mark.parametrize("co_rank", [None, 5])
def test_a_loss_that_is_kept_over_a_step_is_refused(co_rank):
    """Its sketch would belong to projections that are no more; nothing is added to the sketches of the new ones."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns, co_rank=co_rank)
    optimizer = SketchOptimizer(layers, 1e-2)
    kept = loss_of(model, batch)
    loss_of(model, batch).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="before the projections were redrawn"):
        kept.backward()
    assert sketches(layers) == {}
    loss_of(model, batch).backward()
    optimizer.step()


def test_a_loss_that_is_kept_where_nothing_is_redrawn():
    """The draw is the same, and torch itself refuses what needs a weight that was changed (X does, of `down`)."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 1e-2, refresh_every="never")
    kept = loss_of(model, batch)
    loss_of(model, batch).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()

    model = calling(lambda block, x: block.a(x).square().sum() + block.b(x).square().sum())  # x needs no gradient
    gradients = gradients_of(model, ["a", "b"], lambda m: m(inputs()))
    layers = sketched(model, ["a", "b"])
    optimizer = SketchOptimizer(layers, 1e-2, refresh_every="never")
    kept = model(inputs())
    model(inputs()).backward()
    optimizer.step()
    kept.backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)


def test_a_forward_without_a_backward_leaves_nothing():
    model, patterns, batch = build("llama")
    gradients = dense_gradients(model, patterns, batch)
    layers = sketched(model, patterns)
    loss = loss_of(model, batch)
    del loss
    gc.collect()
    assert layers._projected == {} and sketches(layers) == {}
    loss_of(model, batch).backward()
    assert_all_close(sketches(layers), expected(layers, gradients), 1e-12)


def test_no_input_is_kept_alive():
    """After backward every X is gone, with its product; without a garbage collection but for transformers' cycles."""
    model, patterns, batch = build("llama")
    layers = sketched(model, patterns)
    seen: list[weakref.ref[Tensor]] = []
    for module in layers.modules.values():
        module.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss = loss_of(model, batch)
    loss.backward()
    del loss
    gc.collect()
    assert len(seen) == 14 and all(x() is None for x in seen)
    assert layers._projected == {}


def test_an_input_dies_during_the_forward_where_nothing_else_needs_it():
    """X of a frozen layer is not saved, so its product is not cached either once the forward has gone on."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)).double()
    layers = sketched(model, ["0", "1", "2"])
    output = model(inputs())
    assert layers._projected == {}
    output.sum().backward()
    assert all(float(sketch.norm()) > 0 for sketch in sketches(layers).values())


def test_siblings_save_one_tensor():
    """Of what a decoder layer saves with R columns there are seven tensors in four storages of (T, R)."""
    model, patterns, batch = build("llama")
    layers = sketched(model, patterns, rank=5)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = loss_of(model, batch)
    products = [tensor for tensor in saved if tensor.shape[-1:] == (layers.rank,)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in products}
    assert len(products) == 2 * 7 and len(storages) == 2 * 4
    assert set(storages.values()) == {batch.numel() * layers.rank * 8}
    loss.backward()


def test_a_second_derivative_is_refused():
    """A gradient penalty also depends on W through the first gradient, which a sketch does not see."""
    model = calling(lambda block, x: block.a(x.tanh()).square().sum())
    sketched(model, ["a", "b"])
    x = inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True through a sketched layer"):
        torch.autograd.grad(model(x), x, create_graph=True)


def test_an_older_hook_that_changes_the_output_is_differentiated():
    """The sketch takes the gradient at the linear layer's own output, whatever hooks stood there before."""
    model = calling(lambda block, x: block.a(x).square().sum())

    def loss(m: nn.Module) -> Tensor:
        return m(inputs())

    model.block.a.register_forward_hook(lambda module, args, output: output * 3.0)
    check(model, ["a"], loss)


def test_layers_that_are_gone_leave_the_model_as_it_was():
    model, patterns, batch = build("llama")
    before = weights(sketched(deepcopy(model), patterns))
    layers = sketched(model, patterns)
    layers.remove()
    with Products(batch.numel(), layers.rank) as products:
        loss_of(model.requires_grad_(True), batch).backward()
    assert products.count == 0 and sketches(layers) == {}
    assert all(torch.equal(module.weight, before[name]) for name, module in layers.modules.items())
    assert all(module.weight.grad is not None for module in layers.modules.values())


def test_a_copy_of_a_sketched_model_is_no_part_of_it():
    """A deep copy carries the hooks along; its backward adds nothing to the original's sketches."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    copy = deepcopy(model).requires_grad_(True)
    loss_of(copy, batch).backward()
    assert sketches(layers) == {}
    torch.testing.assert_close(copy.up.weight.grad, dense_gradients(build("mlp")[0], patterns, batch)["up"])


@pytest.mark.parametrize("freeze", ["all", "targets"])
def test_tied_embeddings_are_frozen_or_trained_by_their_own_optimizer(freeze):
    batch = tokens(4, 7, 29)
    model = llama(torch.float64, tie_word_embeddings=True)
    reference = deepcopy(model)
    loss_of(reference, batch).backward()
    layers = sketched(model, ["q_proj", "down_proj"], freeze=freeze)
    loss_of(model, batch).backward()
    embedding = model.get_input_embeddings().weight
    if freeze == "all":
        assert all(not parameter.requires_grad for parameter in model.parameters())
        assert embedding.grad is None
    else:
        torch.testing.assert_close(embedding.grad, reference.get_input_embeddings().weight.grad, rtol=1e-10, atol=1e-14)
    exact = dense_gradients(reference, ["q_proj", "down_proj"], batch)
    assert_all_close(sketches(layers), {n: g @ layers.projection(n).T for n, g in exact.items()}, 1e-12)
