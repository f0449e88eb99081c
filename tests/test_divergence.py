"""The predicted divergence is the Fisher form of the displacement and what the exact divergence tends to."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from src import divergence
from src.divergence import kl, kl_from_tangent
from src.methods.dense import DenseOptimizer
from src.sketch.layer import SketchedLayers, select_targets
from src.sketch.optimizer import SketchOptimizer
from tests.tinymodels import PROJECTIONS, llama, mlp, tokens

# torch's forward mode loads decompositions that torch itself scripts.


def logits_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token logits of all positions, (rows * length, V)."""
    output = model(batch)
    return (output if isinstance(output, Tensor) else output.logits).flatten(0, 1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = logits_of(model, batch).view(*batch.shape, -1)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def proposal(
    kind: str, method: str, lr: float = 1e-2, decay: float = 0.4, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, Any, Tensor]:
    """Return (model, optimizer with a proposed displacement, probe tokens)."""
    model, patterns, vocabulary = {
        "llama": lambda: (llama(dtype, **options), PROJECTIONS, 29),
        "mlp": lambda: (mlp(dtype), ["up", "down"], 17),
    }[kind]()
    targets = select_targets(model, patterns)
    optimizer: Any
    if method in ("sketch", "two_sided"):
        layers = SketchedLayers(model, targets, 5, 0, co_rank=11 if method == "two_sided" else None)
        optimizer = SketchOptimizer(layers, lr, "row_adam", weight_decay=decay)
    else:
        optimizer = DenseOptimizer(model, targets, lr, train_all=method == "dense_all", weight_decay=decay)
    loss_of(model, tokens(4, 7, vocabulary, seed=1)).backward()
    optimizer.propose()
    return model, optimizer, tokens(3, 6, vocabulary, seed=2)


def displacement(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (weights before, change) of applying the proposal in full; the model is put back."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.apply(1.0)
    change = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return before, change


def moved(
    model: nn.Module, before: dict[str, Tensor], change: dict[str, Tensor], scale: float, batch: Tensor
) -> Tensor:
    """Logits of the model displaced by `scale` times the change."""
    weights = {name: before[name] + scale * change[name] for name in before}
    output = functional_call(model, weights, (batch,))
    return (output if isinstance(output, Tensor) else output.logits).flatten(0, 1)


def fisher_form(
    model: nn.Module, before: dict[str, Tensor], change: dict[str, Tensor], batch: Tensor, temperature: float
) -> float:
    """Return 1/2 d^T F d by double backward: F d is the gradient of <grad KL(old || theta), d> at theta = old.

    On a copy of the model, in which the hooks of sketched layers do nothing.
    """
    model = deepcopy(model)
    theta = {name: weight.clone().requires_grad_(True) for name, weight in before.items()}
    with sdpa_kernel(SDPBackend.MATH):
        output = functional_call(model, theta, (batch,))
        logits = (output if isinstance(output, Tensor) else output.logits).flatten(0, 1) / temperature
        new = F.log_softmax(logits, -1)
        old = new.detach()
        mean_kl = (old.exp() * (old - new)).sum(-1).mean()
        gradients = torch.autograd.grad(mean_kl, list(theta.values()), create_graph=True)
        along = sum((g * d).sum() for g, d in zip(gradients, change.values(), strict=True))
        assert isinstance(along, Tensor)
        product = torch.autograd.grad(along, list(theta.values()))
    return 0.5 * float(sum((p * d).sum() for p, d in zip(product, change.values(), strict=True)))


def predict(model: nn.Module, optimizer: Any, batch: Tensor, temperature: float = 1.0) -> float:
    _, predicted = divergence.predict(lambda: logits_of(model, batch), by_twos, optimizer.tangents(), temperature)
    return float(predicted.mean())


def by_twos(logits_TV: Tensor) -> tuple[Tensor, ...]:
    """Logits as states, two positions at a time."""
    return logits_TV.split(2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_kl_equals_torchs_and_is_chunked_without_a_seam(temperature):
    """150 positions, more than two chunks of 64."""
    generator = torch.Generator().manual_seed(0)
    old, new = (3 * torch.randn(150, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=old / temperature),
        torch.distributions.Categorical(logits=new / temperature),
    )
    torch.testing.assert_close(kl(old, new, temperature), expected, rtol=1e-10, atol=1e-12)
    assert kl(old.float(), new.float()).dtype == torch.float64
    assert torch.equal(kl(old, old), torch.zeros(150, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_kl_from_tangent_is_half_the_variance(temperature):
    generator = torch.Generator().manual_seed(0)
    logits, tangent = (2 * torch.randn(150, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    probs = torch.softmax(logits / temperature, -1)
    change = tangent / temperature
    expected = 0.5 * ((probs * change**2).sum(-1) - (probs * change).sum(-1) ** 2)
    torch.testing.assert_close(kl_from_tangent(logits, tangent, temperature), expected, rtol=1e-10, atol=1e-12)
    # A shift of all logits changes no distribution.
    shifted = kl_from_tangent(logits, torch.full_like(tangent, 1e3), temperature)
    assert float(shifted.abs().max()) < 1e-20


@pytest.mark.parametrize("kind", ["mlp", "llama"])
@pytest.mark.parametrize("method", ["sketch", "two_sided", "dense", "dense_all"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_prediction_is_the_fisher_form_of_the_displacement(kind, method, temperature):
    """1/2 d^T F d by double backward in float64; d is what apply() adds, weight decay included."""
    model, optimizer, batch = proposal(kind, method)
    predicted = predict(model, optimizer, batch, temperature)
    before, change = displacement(model, optimizer)
    expected = fisher_form(model, before, change, batch, temperature)
    assert expected > 1e-7
    # Llama's norms compute in float32.
    assert predicted == pytest.approx(expected, rel=1e-9 if kind == "mlp" else 1e-5)


@pytest.mark.parametrize("method", ["sketch", "two_sided", "dense"])
def test_weight_decay_alone_is_predicted(method):
    """The rate is tiny and the decay huge, so that the displacement is -0.01 W; biases do not decay here."""
    model, optimizer, batch = proposal("mlp", method, lr=1e-9, decay=1e7)
    predicted = predict(model, optimizer, batch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    targets = ("up.weight", "down.weight")
    change = {name: weight * (-0.01 if name in targets else 0.0) for name, weight in before.items()}
    assert predicted == pytest.approx(fisher_form(model, before, change, batch, 1.0), rel=1e-4)


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_the_exact_divergence_tends_to_the_prediction(method):
    """KL(a d) / (a^2 q) - 1 = O(a): a tenth of the step leaves about a tenth of the error."""
    model, optimizer, batch = proposal("mlp", method)
    predicted = predict(model, optimizer, batch)
    before, change = displacement(model, optimizer)
    old = logits_of(model, batch).detach()
    errors = []
    for scale in (1.0, 0.1, 0.01):
        realised = float(kl(old, moved(model, before, change, scale, batch).detach()).mean())
        errors.append(abs(realised / (scale**2 * predicted) - 1.0))
    assert 1e-4 < errors[0] < 0.3
    assert errors[1] < 0.15 * errors[0] and errors[2] < 0.15 * errors[1]


@pytest.mark.parametrize("scale", [0.0, 0.25, 3.0])
def test_apply_at_a_scale_realises_the_scaled_displacement(scale):
    """The divergence after apply(a) is that of the weights before plus a times the displacement."""
    model, optimizer, batch = proposal("mlp", "sketch")
    before, change = displacement(model, optimizer)
    old = logits_of(model, batch).detach()
    model, optimizer, batch = proposal("mlp", "sketch")
    optimizer.apply(scale)
    found, expected = logits_of(model, batch).detach(), moved(model, before, change, scale, batch)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (float(kl(old, found).mean()) == 0.0) == (scale == 0.0)


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_the_prediction_is_quadratic_in_the_step(method):
    predictions = []
    for lr in (1e-3, 2e-3, 1e-2):
        model, optimizer, batch = proposal("mlp", method, lr=lr)
        predictions.append(predict(model, optimizer, batch))
    assert predictions[1] / predictions[0] == pytest.approx(4.0, rel=1e-9)
    assert predictions[2] / predictions[0] == pytest.approx(100.0, rel=1e-9)


def test_the_prediction_holds_in_float32_at_small_steps():
    """The tangent carries its own exponent: also where float32 weights would round most of the change away."""
    model, optimizer, batch = proposal("llama", "sketch", lr=1e-8, dtype=torch.float32)
    single = predict(model, optimizer, batch)
    model, optimizer, batch = proposal("llama", "sketch", lr=1e-8)
    assert single == pytest.approx(predict(model, optimizer, batch), rel=1e-3)


def test_a_layer_used_twice_carries_its_tangent_twice():
    """M37: against the exact divergence at a small step."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, batch: Tensor) -> Tensor:
            x = self.inner.embed(batch)
            for _ in range(2):
                x = x + self.inner.down(torch.tanh(self.inner.up(x)))
            return self.inner.head(x)

    for method in ("sketch", "dense"):
        model = Twice()
        targets = select_targets(model, ["up", "down"])
        optimizer: Any
        if method == "sketch":
            optimizer = SketchOptimizer(SketchedLayers(model, targets, 5, 0), 1e-6, weight_decay=0.4)
        else:
            optimizer = DenseOptimizer(model, targets, 1e-6, weight_decay=0.4)
        loss_of(model, tokens(4, 7, 17, seed=1)).backward()
        optimizer.propose()
        batch = tokens(3, 6, 17, seed=2)
        predicted = predict(model, optimizer, batch)
        before, change = displacement(model, optimizer)
        assert predicted == pytest.approx(fisher_form(model, before, change, batch, 1.0), rel=1e-8)


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_the_math_kernel_is_forced_for_sdpa(method):
    """M40: the fused kernel has no forward-mode derivative, and raises where the probe does not."""
    model, optimizer, batch = proposal("llama", method, attn_implementation="sdpa")
    with (
        pytest.raises(NotImplementedError, match="forward AD"),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        fwad.dual_level(),
        optimizer.tangents(),
    ):
        logits_of(model, batch)
    predicted = predict(model, optimizer, batch)
    eager, optimizer, batch = proposal("llama", method, attn_implementation="eager")
    assert predicted == pytest.approx(predict(eager, optimizer, batch), rel=1e-5)


@pytest.mark.parametrize("method", ["sketch", "dense_all"])
def test_the_probe_leaves_no_trace(method):
    """Same weights, no gradients recorded, no tangents beyond the level, and the same numbers a second time."""
    model, optimizer, batch = proposal("llama", method)
    before = deepcopy(model.state_dict())
    plain = logits_of(model, batch).detach()
    first = divergence.predict(lambda: logits_of(model, batch), by_twos, optimizer.tangents())
    second = divergence.predict(lambda: logits_of(model, batch), by_twos, optimizer.tangents())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(part.requires_grad for part in first)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(first[0], plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits_of(model, batch).detach(), plain)


def test_an_update_that_does_not_reach_the_logits_is_an_error():
    model, optimizer, batch = proposal("mlp", "sketch")
    other = mlp()
    with pytest.raises(RuntimeError, match="does not reach the logits"):
        divergence.predict(lambda: logits_of(other, batch), by_twos, optimizer.tangents())
