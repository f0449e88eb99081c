"""The dense baseline has the bits of torch's own optimizers, and its tangents are its displacement."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from src.methods.dense import DenseOptimizer
from src.sketch.layer import select_targets
from tests.tinymodels import PROJECTIONS, llama, mlp, tokens

# torch's forward mode loads decompositions that torch itself scripts.


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean next-token cross-entropy of a batch (rows, length)."""
    output = model(batch)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def build(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[str], int]:
    """Return (model, target patterns, vocabulary)."""
    if kind == "llama":
        return llama(dtype), PROJECTIONS, 29
    if kind == "tied":
        return llama(dtype, tie_word_embeddings=True), PROJECTIONS, 29
    return mlp(dtype), ["up", "down"], 17


def dense(model: nn.Module, patterns: list[str], lr: float, **options: Any) -> DenseOptimizer:
    return DenseOptimizer(model, select_targets(model, patterns), lr, **options)


def trained(model: nn.Module, patterns: list[str], train_all: bool) -> list[nn.Parameter]:
    """The parameters that a torch optimizer gets, in the model's order; the rest is frozen."""
    wanted = {id(module.weight) for module in select_targets(model, patterns).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(train_all or id(parameter) in wanted)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", ["llama", "tied", "mlp"])
@pytest.mark.parametrize("train_all", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3, 1e9])
def test_adamw_has_the_bits_of_torch(kind, train_all, max_grad_norm):
    """Five updates with decay; clip_grad_norm_ binding, not binding and absent (M25)."""
    model, patterns, vocabulary = build(kind)
    reference = deepcopy(model)
    parameters = trained(reference, patterns, train_all)
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    torch_adamw = torch.optim.AdamW(parameters, foreach=False, **options)
    optimizer = dense(model, patterns, train_all=train_all, max_grad_norm=max_grad_norm, **options)
    clipped = 0
    for step in range(5):
        batch = tokens(4, 7, vocabulary, seed=step)
        loss_of(reference, batch).backward()
        loss_of(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_grad_norm is None else max_grad_norm)
        torch_adamw.step()
        torch_adamw.zero_grad()
        metrics = optimizer.propose()
        optimizer.apply(1.0)
        assert metrics["gradient_norm"] == float(norm)
        clipped += metrics["clip_scale"] < 1.0
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert clipped == (5 if max_grad_norm == 0.3 else 0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_sgd_has_the_bits_of_torch(max_grad_norm):
    model, patterns, vocabulary = build("llama")
    reference = deepcopy(model)
    parameters = trained(reference, patterns, False)
    torch_sgd = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    optimizer = dense(model, patterns, 0.1, direction="sgd", max_grad_norm=max_grad_norm)
    for step in range(3):
        batch = tokens(4, 7, vocabulary, seed=step)
        loss_of(reference, batch).backward()
        loss_of(model, batch).backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        torch_sgd.step()
        torch_sgd.zero_grad()
        optimizer.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_sgds_decay_is_torchs_to_rounding():
    """torch couples it, p -= lr (g + wd p): for SGD the same number."""
    model, patterns, vocabulary = build("mlp", torch.float64)
    reference = deepcopy(model)
    parameters = trained(reference, patterns, False)
    torch_sgd = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.4)
    optimizer = dense(model, patterns, 0.1, direction="sgd", weight_decay=0.4)
    for step in range(3):
        batch = tokens(4, 7, vocabulary, seed=step)
        loss_of(reference, batch).backward()
        loss_of(model, batch).backward()
        torch_sgd.step()
        torch_sgd.zero_grad()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("train_all", [False, True])
def test_training_moves_what_it_should_and_lowers_the_loss(train_all):
    """M44, M11: the baseline's weights move and its loss responds; what is frozen keeps its bits."""
    model, patterns, vocabulary = build("llama")
    targets = {id(module.weight) for module in select_targets(model, patterns).values()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = dense(model, patterns, 1e-2, train_all=train_all, max_grad_norm=1.0)
    batch = tokens(4, 7, vocabulary)
    losses = []
    for _ in range(10):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        assert optimizer.propose()["gradient_norm"] > 0
        optimizer.apply(1.0)
    assert losses[-1] < 0.7 * losses[0]
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter.detach(), before[name])
        assert moved == (train_all or id(parameter) in targets), name
        assert parameter.requires_grad == moved


@pytest.mark.parametrize("direction", ["adamw", "sgd"])
def test_the_step_scale_multiplies_the_whole_displacement_decay_included(direction):
    model, patterns, vocabulary = build("mlp", torch.float64)
    batch = tokens(4, 7, vocabulary)
    changes = {}
    for scale in (1.0, 0.25, 0.0):
        copy = deepcopy(model)
        optimizer = dense(copy, patterns, 0.02, direction=direction, weight_decay=0.5)
        loss_of(copy, batch).backward()
        optimizer.propose()
        optimizer.apply(scale)
        changes[scale] = copy.up.weight.detach() - model.up.weight.detach()
    torch.testing.assert_close(changes[0.25], 0.25 * changes[1.0], rtol=1e-10, atol=1e-15)
    assert torch.equal(changes[0.0], torch.zeros_like(changes[0.0]))


@pytest.mark.parametrize("kind", ["llama", "tied", "mlp"])
@pytest.mark.parametrize("direction", ["adamw", "sgd"])
@pytest.mark.parametrize("train_all", [False, True])
def test_tangents_are_the_displacements_jvp(kind, direction, train_all):
    """Against torch.func.jvp with the displacement that apply() makes of a copy, at the second update, with decay.

    A tied weight counts at both its uses. propose() and the tangents leave the weights' bits alone.
    """
    model, patterns, vocabulary = build(kind, torch.float64)
    batch = tokens(3, 6, vocabulary, seed=9)
    optimizer = dense(
        model, patterns, 1e-2, direction=direction, train_all=train_all, weight_decay=0.3, max_grad_norm=0.5
    )
    loss_of(model, tokens(4, 7, vocabulary, seed=0)).backward()
    optimizer.step()
    loss_of(model, tokens(4, 7, vocabulary, seed=1)).backward()
    optimizer.propose()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def logits(parameters: dict[str, Tensor]) -> Tensor:
        output = functional_call(model, parameters, (batch,))
        return output if isinstance(output, Tensor) else output.logits

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with fwad.dual_level(), optimizer.tangents():
            output = model(batch)
            dual = output if isinstance(output, Tensor) else output.logits
            primal, tangent = (part.clone() for part in fwad.unpack_dual(dual))
        assert list(before) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
            assert fwad.unpack_dual(parameter).tangent is None
            assert isinstance(parameter, nn.Parameter)
        optimizer.apply(1.0)
        change = {name: parameter - before[name] for name, parameter in model.named_parameters()}
        model.load_state_dict(before, strict=False)
        expected_primal, expected = jvp(logits, (before,), (change,))
    torch.testing.assert_close(primal, expected_primal, rtol=1e-12, atol=1e-12)
    # Weights of size 1 move by 1e-2, so their difference has lost two digits; Llama's norms compute in float32.
    error = float((tangent - expected).norm() / expected.norm())
    assert error < (1e-12 if kind == "mlp" else 1e-6)


def test_tangents_are_off_after_an_error_inside():
    """A forward pass that raises leaves plain parameters and no hooks."""
    model, patterns, vocabulary = build("mlp")
    optimizer = dense(model, patterns, 1e-2)
    loss_of(model, tokens(2, 5, vocabulary)).backward()
    optimizer.propose()
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError), fwad.dual_level(), optimizer.tangents():
        model.up(torch.zeros(3, 5))  # 5 where 12 belongs
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert not model.up._forward_pre_hooks and not model.up._forward_hooks


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model, patterns, vocabulary = build("mlp")
    optimizer = dense(model, patterns, 1e-2, max_grad_norm=1.0)
    batch = tokens(4, 7, vocabulary)
    loss_of(model, batch).backward()
    optimizer.step()
    before, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict()["state"])
    loss_of(model, batch).backward()
    model.down.weight.grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[key][n])) for n, v in values.items())


def test_the_state_continues_bit_for_bit_and_loads_safely(tmp_path):
    """M19, M20: tensors and numbers only; the step counter starts at 1 (M35, F23)."""
    model, patterns, vocabulary = build("mlp")
    optimizer = dense(model, patterns, 1e-2, weight_decay=0.1)

    def updates(steps: range) -> None:
        for step in steps:
            loss_of(model, tokens(4, 7, vocabulary, seed=step)).backward()
            optimizer.step()

    assert not optimizer.state_dict()["state"]
    updates(range(1))
    assert {values["step"] for values in optimizer.state_dict()["state"].values()} == {1}
    updates(range(1, 3))
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    updates(range(3, 6))
    straight = deepcopy(model.state_dict())
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    model = mlp(torch.float32)
    model.load_state_dict(loaded["weights"])
    optimizer = dense(model, patterns, 9.9)
    optimizer.load_state_dict(loaded["optimizer"])
    updates(range(3, 6))
    assert all(torch.equal(value, straight[name]) for name, value in model.state_dict().items())


def test_a_closure_is_refused():
    model, patterns, _ = build("mlp")
    with pytest.raises(ValueError, match="closure"):
        dense(model, patterns, 0.1).step(lambda: 0.0)


@pytest.mark.parametrize("direction", ["adamw", "sgd"])
def test_narrow_weights_are_their_float32_masters_rounding(direction):
    """M16, M31: five updates equal torch's own on float32 copies with the same bfloat16 gradients, to the bit."""
    model, patterns, vocabulary = build("mlp", torch.bfloat16)
    optimizer = dense(model, patterns, 1e-3, direction=direction, weight_decay=0.1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    copies = [nn.Parameter(p.detach().float()) for p in parameters]
    reference: torch.optim.Optimizer
    if direction == "adamw":
        reference = torch.optim.AdamW(copies, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, foreach=False)
    else:
        reference = torch.optim.SGD(copies, lr=1e-3, foreach=False)
    for step in range(5):
        loss_of(model, tokens(4, 7, vocabulary, seed=step)).backward()
        for parameter, copy in zip(parameters, copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            if direction == "sgd":
                copy.data.mul_(1 - 1e-3 * 0.1)
        optimizer.step()
        reference.step()
    for parameter, copy in zip(parameters, copies, strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], copy)
        assert torch.equal(parameter, copy.to(torch.bfloat16))
    held = optimizer.memory()
    assert sum(t.nbytes for t in held["master_weights"]) == 4 * sum(p.numel() for p in parameters)
    assert all(t.dtype == torch.float32 for t in held["optimizer_state"])


def test_plain_storage_has_everything_in_the_weights_precision_and_loses_small_updates():
    moved = {}
    for storage in ("master", "plain"):
        model, patterns, vocabulary = build("mlp", torch.bfloat16)
        optimizer = dense(model, patterns, 1e-6, storage=storage)
        before = deepcopy(model.state_dict())
        for step in range(20):
            loss_of(model, tokens(4, 7, vocabulary, seed=step)).backward()
            optimizer.step()
        held = optimizer.memory()
        assert bool(held["master_weights"]) == (storage == "master")
        moved[storage] = sum(float((v != before[n]).double().sum()) for n, v in model.state_dict().items())
    assert moved["plain"] < moved["master"]
