"""Sketches equal their definition, and updates equal the dense, LoRA and written-out optimizers they stand for."""

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.sketch.direction import check_transfer, row_adam
from src.sketch.layer import SketchedLayers, check_rank, select_targets
from src.sketch.optimizer import SketchOptimizer
from src.sketch.projection import hash_key, rademacher, signs
from tests.tinymodels import PROJECTIONS, Mlp, llama, mlp, tokens


def logits_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)
    return output if isinstance(output, Tensor) else output.logits


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token cross-entropy summed over the tokens of a batch (rows, length)."""
    logits = logits_of(model, batch)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def build(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[str], Tensor]:
    """Return (model, target patterns, batch of tokens)."""
    if kind == "llama":
        return llama(dtype), PROJECTIONS, tokens(4, 7, 29)
    return mlp(dtype), ["up", "down"], tokens(4, 7, 17)


def sketched(model: nn.Module, patterns: list[str], rank: int = 4, seed: int = 3, **options: Any) -> SketchedLayers:
    return SketchedLayers(model, select_targets(model, patterns), rank, seed, **options)


def sketches(layers: SketchedLayers) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in layers.parameters.items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def dense_gradients(model: nn.Module, patterns: list[str], batch: Tensor) -> dict[str, Tensor]:
    """Autograd's weight gradients of the targets, from a copy of the model that knows of no sketch."""
    copy = deepcopy(model).requires_grad_(True)
    loss_of(copy, batch).backward()
    return {name: module.weight.grad for name, module in select_targets(copy, patterns).items()}


def weights(layers: SketchedLayers) -> dict[str, Tensor]:
    return {name: module.weight.detach().clone() for name, module in layers.modules.items()}


def orthogonal(rank: int, width: int, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A square orthogonal A from the key, so that A^T A = I exactly."""
    assert rank == width
    noise = torch.randn(width, width, dtype=dtype, generator=torch.Generator().manual_seed(key & (2**63 - 1)))
    return torch.linalg.qr(noise).Q


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Compare tensor by tensor; the error's norm is relative to the expected one's."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = float((actual[name] - want).norm() / want.norm())
        assert error < relative, (name, error)


# --- the sketch itself ---


@pytest.mark.parametrize("kind", ["llama", "mlp"])
def test_a_sketch_is_the_gradient_times_the_projection(kind):
    """S = (H^T X) A^T in float64; autograd gives H^T X."""
    model, patterns, batch = build(kind)
    gradients = dense_gradients(model, patterns, batch)
    layers = sketched(model, patterns)
    loss_of(model, batch).backward()
    expected = {name: grad @ layers.projection(name).T for name, grad in gradients.items()}
    assert_all_close(sketches(layers), expected, 1e-12)
    assert all(sketch.shape == (gradients[name].shape[0], 4) for name, sketch in sketches(layers).items())


def test_a_sketch_is_the_outer_product_of_captured_inputs_and_output_gradients():
    """The same from X and H themselves, caught by hooks, with a bias in the layer."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            caught[f"{name}.x"] = args[0].detach().flatten(0, 1)
            output.register_hook(lambda grad: caught.update({f"{name}.h": grad.flatten(0, 1)}))

        return hook

    for name, module in layers.modules.items():
        module.register_forward_hook(catch(name))
    loss_of(model, batch).backward()
    expected = {n: (caught[f"{n}.h"].T @ caught[f"{n}.x"]) @ layers.projection(n).T for n in layers.modules}
    assert_all_close(sketches(layers), expected, 1e-12)


@pytest.mark.parametrize("kind", ["llama", "mlp"])
@pytest.mark.parametrize("direction", ["sgd", "row_adam"])
def test_microbatches_give_the_same_sketch_and_update(kind, direction):
    """M01, M02, M04, F08: 1, 2 and 4 microbatches, float32, to 1e-6 of the norm; one step of the optimizer each."""
    results = []
    for parts in (1, 2, 4):
        model, patterns, batch = build(kind, torch.float32)
        layers = sketched(model, patterns)
        optimizer = SketchOptimizer(layers, 1e-2, direction=direction, refresh_every=1)
        before = weights(layers)
        for microbatch in batch.chunk(parts):
            (loss_of(model, microbatch) / batch.numel()).backward()
            assert layers.draw == 0 and optimizer.updates == 0
        sums = sketches(layers)
        optimizer.step()
        assert optimizer.updates == 1 and layers.draw == 1
        if direction == "row_adam":
            assert {state["step"] for state in optimizer.state.values()} == {1}
        results.append((sums, {name: weight - before[name] for name, weight in weights(layers).items()}))
    for sums, changes in results[1:]:
        assert_all_close(sums, results[0][0], 1e-6)
        # The change is a difference of weights rounded to float32, so some roundings of the weight more.
        assert_all_close(changes, results[0][1], 5e-5)


def test_a_layer_used_twice_in_a_forward_counts_twice():
    """M37: S is the sketch of the sum of both uses' gradients."""
    model, patterns, batch = build("mlp")

    class Twice(nn.Module):
        def __init__(self, inner: Mlp):
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.inner.embed(tokens)
            for _ in range(2):
                x = x + self.inner.down(torch.tanh(self.inner.up(x)))
            return self.inner.head(x)

    twice = Twice(model)
    gradients = dense_gradients(twice, patterns, batch)
    layers = sketched(twice, patterns)
    loss_of(twice, batch).backward()
    assert_all_close(
        sketches(layers), {name: grad @ layers.projection(name).T for name, grad in gradients.items()}, 1e-12
    )


def test_checkpointing_counts_each_sketch_once_and_reaches_the_first_layer():
    """M37, M38: embeddings are frozen and every layer is recomputed in backward (without reentry)."""
    model, patterns, batch = build("llama")
    layers = sketched(model, patterns)
    loss_of(model, batch).backward()
    plain = sketches(layers)
    assert plain.keys() == layers.modules.keys()
    assert all(float(sketch.norm()) > 0 for sketch in plain.values())
    for parameter in layers.parameters.values():
        parameter.grad = None
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; this model has no dropout
    calls = []
    layers.modules["model.layers.0.self_attn.q_proj"].register_forward_hook(lambda *_: calls.append(1))
    loss_of(model, batch).backward()
    assert len(calls) == 2  # so the layer was indeed recomputed
    assert_all_close(sketches(layers), plain, 1e-12)


class _Watch(TorchDispatchMode):
    """Collects the outputs of every operator that share no storage with the given tensors."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.shapes.add(tuple(leaf.shape))
        return out


def weight_shapes(layers: SketchedLayers) -> set[tuple[int, ...]]:
    shapes = {tuple(module.weight.shape) for module in layers.modules.values()}
    return shapes | {shape[::-1] for shape in shapes}


@pytest.mark.parametrize("kind", ["llama", "mlp"])
def test_no_tensor_of_a_weights_shape_is_made(kind):
    """F29: no operator's output, forward or backward, has a target's shape or its transpose; no `.grad` either."""
    model, patterns, batch = build(kind)
    layers = sketched(model, patterns)
    with _Watch(list(model.parameters())) as watch:
        loss_of(model, batch).backward()
    assert not watch.shapes & weight_shapes(layers)
    assert {(m.out_features, 4) for m in layers.modules.values()} <= watch.shapes  # the watch sees the sketches
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_watch_sees_dense_gradients():
    """The test above would notice: without sketches the weights' shapes do appear."""
    model, patterns, batch = build("llama")
    shapes = weight_shapes(sketched(deepcopy(model), patterns))
    loss = loss_of(model, batch)
    with _Watch(list(model.parameters())) as watch:
        loss.backward()
    assert watch.shapes & shapes


def test_forward_keeps_the_projected_input_and_not_the_input():
    """What a sketched layer saves for backward is X A^T (T, R), beside views of frozen weights."""
    model = nn.Sequential(nn.Linear(30, 10, bias=False)).double()
    layers = sketched(model, ["0"])
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        model(torch.randn(5, 30, dtype=torch.float64))
    assert saved == [(5, layers.rank)]


def test_forward_without_gradients_sketches_nothing():
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    plain = logits_of(model, batch).detach()
    with torch.no_grad():
        assert torch.equal(logits_of(model, batch), plain)
    assert sketches(layers) == {}
    layers.remove()
    assert not logits_of(model, batch).requires_grad


def test_sketches_leave_the_outputs_bits_alone():
    model, patterns, batch = build("llama", torch.float32)
    plain = logits_of(model, batch).detach()
    sketched(model, patterns)
    assert torch.equal(logits_of(model, batch).detach(), plain)


def test_sketches_of_bfloat16_weights_are_float32():
    """M31: the sum over microbatches and the moments do not inherit the weights' bfloat16."""
    model, patterns, batch = build("mlp", torch.bfloat16)
    exact = dense_gradients(deepcopy(model).double(), patterns, batch)
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 1e-2)
    loss_of(model, batch).backward()
    found = sketches(layers)
    assert {sketch.dtype for sketch in found.values()} == {torch.float32}
    expected = {name: grad @ layers.projection(name).double().T for name, grad in exact.items()}
    assert_all_close({name: sketch.double() for name, sketch in found.items()}, expected, 0.05)
    optimizer.step()
    assert {state["second_moment"].dtype for state in optimizer.state.values()} == {torch.float32}


# --- the targets ---


def test_targets_by_last_part_or_by_path_in_the_models_order():
    model = llama()
    assert list(select_targets(model, ["down_proj", "q_proj"])) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert list(select_targets(model, ["*.layers.1.*.up_proj"])) == ["model.layers.1.mlp.up_proj"]
    with torch.device("meta"):
        assert list(select_targets(Mlp(), ["up"])) == ["up"]


@pytest.mark.parametrize(("pattern", "reason"), [("qproj", "matches no module"), ("embed", "Embedding")])
def test_a_pattern_that_names_no_linear_layer_is_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        select_targets(mlp(), ["up", pattern])
    assert repr(pattern) in str(caught.value) and "down, head, up" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 13])
def test_a_rank_outside_the_smallest_width_is_refused(rank):
    """The smallest input width is `up`'s 12."""
    model = mlp()
    with pytest.raises(ValueError, match=r"1 and the smallest input width .* 12 \(up\), got"):
        check_rank(select_targets(model, ["up", "down"]), rank)
    with pytest.raises(ValueError, match="method.rank"):
        sketched(model, ["up", "down"], rank)
    check_rank(select_targets(model, ["up", "down"]), 12)


def test_a_target_whose_weight_is_used_elsewhere_is_refused():
    """M37: a tied head would miss the embedding's part of the gradient and of the prediction, two twins decay twice."""
    model = llama(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head shares its weight"):
        sketched(model, ["q_proj", "lm_head"])
    sketched(model, ["q_proj"])
    sketched(llama(), ["q_proj", "lm_head"])
    twins = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    twins[1].weight = twins[0].weight
    with pytest.raises(ValueError, match="0 shares its weight"):
        sketched(twins, ["0", "1"])


# --- updates against the optimizers they stand for ---


def square_llama() -> tuple[nn.Module, list[str]]:
    """A model and targets that all read the hidden width, so that R = N for every one."""
    return llama(torch.float64), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
def test_full_rank_orthogonal_sgd_is_dense_sgd(max_grad_norm):
    """R = N, redrawn at every update, with weight decay; M25: the global clip is clip_grad_norm_'s, binding or not."""
    model, patterns = square_llama()
    reference = deepcopy(model).requires_grad_(False)
    targets = select_targets(reference, patterns)
    parameters = [module.weight.requires_grad_(True) for module in targets.values()]
    # torch's coupled decay, p -= lr (g + wd p), is for SGD the decoupled one.
    dense = torch.optim.SGD(parameters, lr=0.05, weight_decay=0.3)
    layers = sketched(model, patterns, rank=24, projection=orthogonal)
    optimizer = SketchOptimizer(layers, 0.05, "sgd", weight_decay=0.3, max_grad_norm=max_grad_norm, clip_norm="sketch")
    start = weights(layers)
    for update in range(4):
        batch = tokens(4, 7, 29, seed=update)
        (loss_of(reference, batch) / batch.numel()).backward()
        (loss_of(model, batch) / batch.numel()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        dense.step()
        dense.zero_grad()
        metrics = optimizer.propose()
        optimizer.apply(1.0)
        assert metrics["sketch_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["estimate_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["clip_scale"] == pytest.approx(min(1.0, max_grad_norm / norm), rel=1e-4)
        assert layers.draw == update + 1
    # clip_grad_norm_ divides by norm + 1e-6: relative 2e-5 of a clipped step at the largest.
    change = {name: weight - start[name] for name, weight in weights(layers).items()}
    expected = {name: module.weight.detach() - start[name] for name, module in targets.items()}
    assert_all_close(change, expected, 1e-5 if max_grad_norm < 1 else 1e-10)


def test_full_rank_orthogonal_row_adam_is_row_adam_on_the_dense_gradient():
    """An orthogonal A keeps a row's mean square, so D A is the row-wise Adam direction of G, whatever the redraws."""
    model, patterns = square_llama()
    reference = deepcopy(model)
    layers = sketched(model, patterns, rank=24, projection=orthogonal)
    optimizer = SketchOptimizer(layers, 0.01, "row_adam", beta2=0.9, eps=1e-6, clip_norm="none", refresh_every=2)
    expected = select_targets(reference, patterns)
    moments = {name: torch.zeros(module.out_features, 1).double() for name, module in expected.items()}
    for step in range(1, 6):
        batch = tokens(4, 7, 29, seed=step)
        loss_of(model, batch).backward()
        gradients = dense_gradients(reference, patterns, batch)
        optimizer.step()
        for name, module in expected.items():
            gradient = gradients[name]
            moments[name] = 0.9 * moments[name] + 0.1 * (gradient**2).mean(1, keepdim=True)
            root = (moments[name] / (1 - 0.9**step)).sqrt()
            module.weight.data -= 0.01 * gradient / (root + 1e-6)
    assert_all_close(weights(layers), {n: m.weight.detach() for n, m in expected.items()}, 1e-9)


@pytest.mark.parametrize("direction", ["sgd", "row_adam", "adam"])
def test_never_redrawn_is_lora_with_a_frozen_a(direction):
    """W0 + B A with B trained from 0 (by torch.optim's SGD or Adam, or by RowAdam written out) is the merged sketch."""
    model, patterns, _ = build("mlp")
    base = deepcopy(model).requires_grad_(False)
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.02, direction, beta2=0.8, eps=1e-5, clip_norm="none", refresh_every="never")
    frozen = {name: layers.projection(name) for name in layers.modules}
    origin = {name: module.weight.detach() for name, module in select_targets(base, patterns).items()}
    factors = {
        n: torch.zeros(m.out_features, 4, dtype=torch.float64, requires_grad=True) for n, m in layers.modules.items()
    }
    sgd: torch.optim.Optimizer = torch.optim.SGD(factors.values(), lr=0.02)
    if direction == "adam":
        sgd = torch.optim.Adam(factors.values(), lr=0.02, betas=(0.9, 0.8), eps=1e-5)
    moments = {name: torch.zeros(factor.shape[0], 1).double() for name, factor in factors.items()}
    for step in range(1, 7):
        batch = tokens(4, 7, 17, seed=step)
        adapted = {f"{name}.weight": origin[name] + factors[name] @ frozen[name] for name in factors}
        logits = functional_call(base, adapted, (batch,))[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").backward()
        loss_of(model, batch).backward()
        optimizer.step()
        if direction == "row_adam":
            for name, factor in factors.items():
                moments[name] = 0.8 * moments[name] + 0.2 * (factor.grad**2).mean(1, keepdim=True)
                factor.grad /= (moments[name] / (1 - 0.8**step)).sqrt() + 1e-5
        sgd.step()
        sgd.zero_grad()
    merged = {name: (origin[name] + factors[name] @ frozen[name]).detach() for name in factors}
    assert_all_close(weights(layers), merged, 1e-12)
    assert all(float((merged[name] - origin[name]).norm()) > 0.1 for name in merged)  # they did train


# --- Adam in sketch space at a redraw; the paper's scalings ---


def adam_for(model: nn.Module, patterns: list[str], **options: Any) -> SketchOptimizer:
    options = {"beta1": 0.5, "clip_norm": "none", "refresh_every": 3} | options
    return SketchOptimizer(sketched(model, patterns), 0.02, "adam", **options)


def test_reset_moments_begin_again_at_a_redraw():
    """After the third update a new optimizer on the same weights and draw makes the same update."""
    model, patterns, _ = build("mlp")
    optimizer = adam_for(model, patterns)
    for step in range(3):
        loss_of(model, tokens(4, 7, 17, seed=step)).backward()
        optimizer.step()
    assert all(state["step"] == 0 and not state["first_moment"].any() for state in optimizer.state.values())
    copy = mlp(torch.float64)
    copy.load_state_dict(model.state_dict())
    fresh = adam_for(copy, patterns)
    assert optimizer.layers.draw == 1
    fresh.layers.draw = 1
    for target, one in ((model, optimizer), (copy, fresh)):
        loss_of(target, tokens(4, 7, 17, seed=9)).backward()
        one.step()
    assert all(torch.equal(a, weights(fresh.layers)[name]) for name, a in weights(optimizer.layers).items())


def test_transferred_moments_are_the_decoded_ones_in_the_new_projection():
    """m A_old A_new^T and the rows' mean squares, written out; between redraws nothing is touched."""
    model, patterns, _ = build("mlp")
    optimizer = adam_for(model, patterns, moments="transfer", beta1=0.1)
    for step in range(2):
        loss_of(model, tokens(4, 7, 17, seed=step)).backward()
        optimizer.step()
    loss_of(model, tokens(4, 7, 17, seed=2)).backward()
    optimizer.propose()  # the moments of the third update; the redraw comes with its merge
    later = sketched(mlp(torch.float64), patterns)
    later.draw = 1
    expected = {}
    for name, parameter in optimizer.layers.parameters.items():
        state = optimizer.state[parameter]
        old, new = optimizer.layers.projection(name), later.projection(name)
        first = state["first_moment"] @ old @ new.T
        second = state["second_moment"].mean(1, keepdim=True).expand(-1, optimizer.layers.rank)
        expected[name] = (first.clone(), second.clone(), state["step"])
    optimizer.apply(1.0)
    for name, parameter in optimizer.layers.parameters.items():
        state, (first, second, step) = optimizer.state[parameter], expected[name]
        torch.testing.assert_close(state["first_moment"], first, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(state["second_moment"], second, rtol=1e-12, atol=0)
        assert state["step"] == step == 3 and float(first.norm()) > 0


@pytest.mark.parametrize(("rank", "width", "every"), [(4, 40, 1), (8, 24, 3)])
def test_transfers_are_refused_exactly_where_momentum_feeds_on_itself(rank, width, every):
    """Measured: the mean growth of the decoded momentum's energy over a redraw, 4000 draws of both projections."""
    bound = (rank / (rank + width - 1)) ** 0.5
    momentum = torch.randn(2, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    growth = []
    for draw in range(4000):
        old, new = (rademacher(rank, width, hash_key(side, draw), torch.float64) for side in ("old", "new"))
        decoded = momentum @ old
        growth.append(float((decoded @ new.T @ new).square().sum() / decoded.square().sum()))
    assert abs(sum(growth) / 4000 * bound**2 - 1.0) < 0.05  # at beta^K = bound the energy stays as it is
    for beta1, refused in (((bound * 1.01) ** (1 / every), True), ((bound * 0.99) ** (1 / every), False)):
        if refused:
            with pytest.raises(ValueError, match="lets the momentum grow at every redraw") as error:
                check_transfer(beta1, every, rank, width)
            least = int(re.search(r"refresh_every=(\d+) or more", str(error.value))[1])  # type: ignore[index]
            check_transfer(beta1, least, rank, width)
            with pytest.raises(ValueError):
                check_transfer(beta1, least - 1, rank, width)
        else:
            check_transfer(beta1, every, rank, width)
    with pytest.raises(ValueError, match="moments=transfer with refresh_every=1, beta1=0.9"):
        model, patterns, _ = build("mlp")
        SketchOptimizer(sketched(model, patterns), 0.1, "adam", moments="transfer")


@pytest.mark.parametrize("direction", ["sgd", "row_adam", "adam"])
def test_the_papers_scalings(direction):
    """Each layer's direction has its sketch's norm; the whole update's norm is the rate times the weights'."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.5, direction, clip_norm="none", preserve_norm=True)
    loss_of(model, batch).backward()
    found = sketches(layers)
    optimizer.propose()
    for name, sketch in found.items():
        torch.testing.assert_close(optimizer._proposed()[name].left_MR.norm(), 0.5 * sketch.norm())

    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 6e-5, direction, clip_norm="none", lr_is="ratio")
    before = weights(layers)
    loss_of(model, batch).backward()
    optimizer.step()
    change = torch.stack([(weight - before[name]).norm() for name, weight in weights(layers).items()]).norm()
    whole = torch.stack([weight.norm() for weight in before.values()]).norm()
    assert float(change / whole) == pytest.approx(6e-5, rel=1e-9)


def test_a_ratio_of_an_update_of_zeros_is_no_division_by_zero():
    model, patterns, batch = build("mlp")
    optimizer = SketchOptimizer(sketched(model, patterns), 6e-5, lr_is="ratio", preserve_norm=True)
    before = weights(optimizer.layers)
    (loss_of(model, batch) * 0.0).backward()
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(optimizer.layers).items())


def test_row_adam_equals_its_formula_and_keeps_its_input():
    sketch = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sketch[4] = 0.0
    moment, reference = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for step in range(1, 4):
        current = sketch * step
        kept = current.clone()
        direction = row_adam(current, moment, step, beta2=0.95, eps=1e-8)
        reference = 0.95 * reference + 0.05 * (current**2).mean(1)
        expected = current / ((reference / (1 - 0.95**step)).sqrt() + 1e-8)[:, None]
        torch.testing.assert_close(direction, expected, rtol=1e-12, atol=0)
        assert torch.equal(current, kept)
        if step == 1:
            torch.testing.assert_close(
                direction[:4].square().mean(1).sqrt(), torch.ones(4, dtype=torch.float64), rtol=1e-6, atol=0
            )
    assert torch.equal(direction[4], torch.zeros(3, dtype=torch.float64))  # 0 / (0 + eps), not NaN


# --- norms, clipping, decay, learning rate ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_gram_norm_is_the_estimates_norm(dtype, tolerance):
    model, patterns, batch = build("llama", dtype)
    layers = sketched(model, patterns, rank=7)
    loss_of(model, batch).backward()
    estimates = [sketch @ layers.projection(name) for name, sketch in sketches(layers).items()]
    explicit = math.sqrt(sum(float(estimate.double().square().sum()) for estimate in estimates))
    assert float(layers.estimate_norm(sketches(layers))) == pytest.approx(explicit, rel=tolerance)
    sketch_norm = math.sqrt(sum(float(sketch.double().square().sum()) for sketch in sketches(layers).values()))
    metrics = SketchOptimizer(layers, 0.1).propose()
    assert metrics["sketch_norm"] == pytest.approx(sketch_norm, rel=1e-6)
    assert metrics["estimate_norm"] == pytest.approx(explicit, rel=tolerance)
    assert metrics["estimate_norm"] > 1.2 * metrics["sketch_norm"]  # about sqrt(N / R)


def test_the_squared_sketch_norm_is_unbiased_for_the_gradients():
    """||S||^2 over 300 draws, within 4.5 standard errors of ||G||^2."""
    model, patterns, batch = build("mlp")
    gradients = dense_gradients(model, patterns, batch)
    exact = sum(float(gradient.square().sum()) for gradient in gradients.values())
    layers = sketched(model, patterns)
    values = []
    for draw in range(300):
        layers.draw = draw
        values.append(sum(float((g @ layers.projection(n).T).square().sum()) for n, g in gradients.items()))
    spread = torch.tensor(values, dtype=torch.float64)
    error = float(spread.std()) / 300**0.5
    assert error < 0.1 * exact
    assert abs(float(spread.mean()) - exact) < 4.5 * error


@pytest.mark.parametrize("clip_norm", ["sketch", "estimate", "none"])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_clipping_by_either_norm_with_decay_and_step_scale(clip_norm, factor):
    """W <- (1 - a lr wd) W - a lr c S A with c = min(1, threshold / norm), the threshold below and above the norm."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    loss_of(model, batch).backward()
    parts, before = sketches(layers), weights(layers)
    norms = {
        "sketch": math.sqrt(sum(float(s.square().sum()) for s in parts.values())),
        "estimate": math.sqrt(sum(float((s @ layers.projection(n)).square().sum()) for n, s in parts.items())),
        "none": 1.0,
    }
    threshold = factor * norms[clip_norm]
    scale = 1.0 if clip_norm == "none" else min(1.0, factor)
    expected = {
        name: (1 - 0.5 * 0.01 * 0.2) * before[name] - 0.5 * 0.01 * scale * parts[name] @ layers.projection(name)
        for name in parts
    }
    optimizer = SketchOptimizer(layers, 0.01, "sgd", weight_decay=0.2, max_grad_norm=threshold, clip_norm=clip_norm)
    assert optimizer.propose()["clip_scale"] == pytest.approx(scale, rel=1e-5)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(layers).items())
    optimizer.apply(0.5)
    assert_all_close(weights(layers), expected, 1e-7 if clip_norm != "none" else 1e-12)
    assert sketches(layers) == {}


def test_a_step_scale_of_zero_changes_nothing_but_counts_the_update():
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.1, weight_decay=0.5)
    before = weights(layers)
    loss_of(model, batch).backward()
    optimizer.propose()
    optimizer.apply(0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(layers).items())
    assert optimizer.updates == 1 and layers.draw == 1 and sketches(layers) == {}


def test_the_merge_uses_the_schedulers_learning_rate():
    """M22, M23: warm-up from 0, then decay; the rate is read off the merged change of every update."""
    model, patterns, _ = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.04, "sgd", clip_norm="none")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0, 0.3, 0.1][step])
    applied = []
    for step in range(4):
        loss_of(model, tokens(4, 7, 17, seed=step)).backward()
        rate = scheduler.get_last_lr()[0]
        estimates = {name: sketch @ layers.projection(name) for name, sketch in sketches(layers).items()}
        before = weights(layers)
        optimizer.step()
        scheduler.step()
        changes = {name: weight - before[name] for name, weight in weights(layers).items()}
        found = [-float((changes[n] * e).sum() / e.square().sum()) for n, e in estimates.items()]
        assert found == pytest.approx([rate] * len(found), rel=1e-9, abs=1e-15)
        applied.append(rate)
    assert applied == [0.0, 0.02, 0.04, 0.012]


@pytest.mark.parametrize(("refresh_every", "draws"), [(1, [1, 2, 3, 4]), (3, [0, 0, 1, 1]), ("never", [0] * 4)])
def test_projections_are_redrawn_when_due_and_only_after_the_merge(refresh_every, draws):
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.01, refresh_every=refresh_every)
    found = []
    for _ in draws:
        used = {name: layers.projection(name) for name in layers.modules}
        loss_of(model, batch).backward()
        before = weights(layers)
        optimizer.propose()
        optimizer.apply(1.0)
        for name, weight in weights(layers).items():  # the change lies in the rows of the A that made the sketch
            change = weight - before[name]
            left = torch.linalg.lstsq(used[name].T, change.T).solution
            torch.testing.assert_close(used[name].T @ left, change.T, rtol=1e-9, atol=1e-12)
        found.append(layers.draw)
    assert found == draws


def test_a_layer_outside_the_loss_is_left_alone():
    """No gradient: neither the direction nor the weight decay touches it."""
    model, _, batch = build("mlp")
    model.spare = nn.Linear(12, 5).double()
    layers = sketched(model, ["up", "spare"])
    optimizer = SketchOptimizer(layers, 0.1, weight_decay=0.5, unreached="skip")
    before = weights(layers)
    loss_of(model, batch).backward()
    optimizer.step()
    assert torch.equal(model.spare.weight, before["spare"])
    assert not torch.equal(model.up.weight, before["up"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, everywhere):
    """All entries, or a single one; moments, projections and weights stay, and the next update is a usual one."""
    model, patterns, batch = build("mlp")
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.1, "row_adam")
    loss_of(model, batch).backward()
    optimizer.step()
    before, state = weights(layers), deepcopy(optimizer.state_dict())
    loss_of(model, batch).backward()
    for parameter in layers.parameters.values():
        if everywhere:
            parameter.grad.fill_(bad)
        else:
            parameter.grad[0, 0] = bad
            break
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(layers).items())
    for key, values in optimizer.state_dict()["state"].items():
        assert values["step"] == state["state"][key]["step"] == 1
        assert torch.equal(values["second_moment"], state["state"][key]["second_moment"])
    assert layers.draw == optimizer.updates == 1


def test_an_update_without_any_gradient_is_an_error():
    """M38, M11: a backward pass that never reached the targets is no update of size 0."""
    model, patterns, _ = build("mlp")
    with pytest.raises(RuntimeError, match="no gradient reached"):
        SketchOptimizer(sketched(model, patterns), 0.1).step()


def test_a_closure_is_refused():
    model, patterns, _ = build("mlp")
    with pytest.raises(ValueError, match="closure"):
        SketchOptimizer(sketched(model, patterns), 0.1).step(lambda: 0.0)


# --- state ---


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def test_the_state_is_plain_loads_safely_and_continues_bit_for_bit(tmp_path):
    """M19, M20, F62: tensors, numbers and names only; weights_only=True; three more updates give the same bits."""
    model, patterns, _ = build("mlp", torch.float32)
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 0.01, "row_adam", weight_decay=0.1, refresh_every="never")

    def updates(steps: range) -> None:
        for step in steps:
            loss_of(model, tokens(4, 7, 17, seed=step)).backward()
            optimizer.step()

    updates(range(3))
    assert {type(leaf) for leaf in leaves(optimizer.state_dict())} <= {Tensor, int, float, str, bool, type(None)}
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    updates(range(3, 6))
    straight = weights(layers)

    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    model = mlp(torch.float32)
    model.load_state_dict(loaded["weights"])
    layers = sketched(model, patterns)
    optimizer = SketchOptimizer(layers, 9.9, "row_adam")  # the groups' values come from the state
    optimizer.refresh_every = "never"
    optimizer.load_state_dict(loaded["optimizer"])
    assert {state["step"] for state in optimizer.state.values()} == {3}
    assert optimizer.param_groups[0]["lr"] == 0.01
    updates(range(3, 6))
    assert all(torch.equal(weight, straight[name]) for name, weight in weights(layers).items())


def test_the_projection_is_a_function_of_seed_draw_and_name():
    """The keys that the documentation names: a base a width and signs a group make A in any process, on any device."""
    model = llama(torch.float64)
    layers = sketched(model, PROJECTIONS, seed=8)
    layers.draw = 2
    for name, group in (
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn:24"),
        ("model.layers.1.mlp.down_proj", "model.layers.1.mlp:44"),
    ):
        width = layers.modules[name].in_features
        base = rademacher(4, width, hash_key("projection", 8, 2, width), torch.float64)
        (columns,) = signs(width, [hash_key("projection", 8, 2, "signs", group)])
        assert torch.equal(layers.projection(name), base * columns)
    assert len(layers.projection_tensors()) == 2 + 3 * 2  # a base a width; signs of attention, MLP and down_proj


def test_layers_that_read_one_input_share_a_projection_and_others_do_not():
    """q, k, v and gate, up have one A each; what follows in a Sequential, and other decoder layers, have others."""
    layers = sketched(llama(torch.float64), PROJECTIONS)
    first, second = "model.layers.0", "model.layers.1"
    a = {name: layers.projection(name) for name in layers.modules}
    assert torch.equal(a[f"{first}.self_attn.q_proj"], a[f"{first}.self_attn.v_proj"])
    assert torch.equal(a[f"{first}.mlp.gate_proj"], a[f"{first}.mlp.up_proj"])
    for one, other in (
        (f"{first}.self_attn.q_proj", f"{second}.self_attn.q_proj"),
        (f"{first}.self_attn.q_proj", f"{first}.mlp.up_proj"),
        (f"{first}.mlp.down_proj", f"{second}.mlp.down_proj"),
    ):
        assert not torch.equal(a[one], a[other]) and not torch.equal(a[one], -a[other])
    chain = sketched(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).double(), ["0", "1"])
    assert not torch.equal(chain.projection("0"), chain.projection("1"))


def test_a_flattened_or_sharded_weight_is_refused():
    """M05, F31: a wrapper that reshapes parameters (DeepSpeed, FSDP1) leaves no matrix to sketch."""
    model = mlp(torch.float64)
    targets = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    name, module = next(iter(targets.items()))
    module.weight = nn.Parameter(module.weight.detach().flatten())
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has the shape .* flattened or sharded"):
        SketchedLayers(model, targets, rank=1, seed=0)


@pytest.mark.parametrize("clip_norm", ["sketch", "estimate"])
def test_clipping_needs_no_second_backward(clip_norm):
    """M26: the graph is gone after one backward, and either norm can still be had and clipped."""
    model, patterns, batch = build("llama")
    layers = sketched(model, patterns)
    passes = []
    list(layers.modules.values())[-1].register_full_backward_hook(lambda *_: passes.append(1))
    optimizer = SketchOptimizer(layers, lr=0.1, clip_norm=clip_norm, max_grad_norm=1e-3)
    loss_of(model, batch).backward()
    assert optimizer.propose()["clip_scale"] < 1.0
    optimizer.apply(1.0)
    assert len(passes) == 1
