"""Layers and states that a sketch would get wrong are refused, and odd sketches give what they should."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from src.sketch import SketchedLayers, SketchOptimizer, select_targets, sketching
from src.sketch.direction import reconstruct, row_adam
from src.sketch.layer import check_rank
from src.sketch.projection import FAMILIES, Group, Projections
from tests.launching import PROJECT
from tests.tinymodels import mlp


class Scaled(nn.Linear):
    """A linear layer that computes with something else than its weight, as quantised and adapted ones do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.1, self.bias)


def int8() -> nn.Linear:
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    return layer


def hooked() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def twins() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.other = nn.Linear(8, 8)  # type: ignore[assignment]
    layer.other.weight.data = layer.weight.data  # type: ignore[union-attr, operator]
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Scaled(8, 8), "0 is a Scaled that computes something else"),
        (hooked(), "0 is a Linear that computes something else"),
        (int8(), "the weight of 0 is torch.int8"),
        (weight_norm(nn.Linear(8, 8)), "the weight of 0 is computed"),
        (twins(), "0 shares its weight"),
    ],
)
def test_layers_whose_gradient_is_not_the_weights_are_refused(layer, reason):
    with pytest.raises(ValueError, match=reason):
        SketchedLayers(nn.Sequential(layer), {"0": layer}, rank=2, seed=0)


def test_a_weight_that_becomes_computed_later_is_refused():
    model = nn.Sequential(nn.Linear(8, 8))
    with sketching(model, ["0"], 2, 0.1) as optimizer:
        weight_norm(model[0])
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises(ValueError, match="the weight of 0 is computed"):
            optimizer.step()
        optimizer.zero_grad()


def test_what_is_said_wrong_is_named():
    model = mlp()
    targets = select_targets(model, ["up"])
    for options, reason in (
        ({"projection": "gausian"}, "projection must be one of rademacher"),
        ({"freeze": "target"}, "freeze must be all or targets"),
    ):
        with pytest.raises(ValueError, match=reason):
            SketchedLayers(model, targets, 2, 0, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patterns are a list, got the text 'up'"):
        select_targets(model, "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no target layer"):
        check_rank({}, 2)
    layers = SketchedLayers(model, targets, 2, 0)
    with pytest.raises(ValueError, match="up is sketched already"):
        SketchedLayers(model, targets, 2, 1)
    layers.remove()
    SketchedLayers(model, targets, 2, 1)


def test_a_state_of_another_direction_is_refused():
    states = {}
    for direction in ("row_adam", "adam"):
        with sketching(mlp(), ["up"], 2, 0.1, direction=direction, refresh_every="never") as optimizer:
            states[direction] = optimizer.state_dict()
    with sketching(mlp(), ["up"], 2, 0.1) as optimizer, pytest.raises(ValueError, match="direction=adam"):
        optimizer.load_state_dict(states["adam"])


def test_masters_of_a_state_are_left_where_storage_has_none():
    """Else they would undo what is changed behind them, unseen."""
    with sketching(mlp(torch.bfloat16), ["up"], 2, 0.1) as optimizer:
        state = optimizer.state_dict()
    with sketching(mlp(torch.bfloat16), ["up"], 2, 0.1, storage="plain") as optimizer:
        optimizer.load_state_dict(state)
        assert not optimizer.memory()["master_weights"]


def test_sketches_do_not_outlive_their_projections():
    with sketching(mlp(), ["up"], 2, 0.1) as optimizer:
        optimizer.layers.parameters["up"].grad = torch.ones(20, 2, dtype=torch.float64)
        optimizer.layers.draw = 3
        assert optimizer.layers.sketches() == []


def test_rows_without_a_gradient_stay_where_the_sketch_has_a_lower_rank():
    """One live row of twenty: Q's other columns are arbitrary, and RowAdam would blow round-off up to full steps."""
    gradient = torch.zeros(20, 12, dtype=torch.float32)
    gradient[3] = torch.linspace(-1.0, 1.0, 12)
    for draw in range(20):
        places = (
            [Group("a", 12, torch.float32, torch.device("cpu"))],
            [Group("a", 20, torch.float32, torch.device("cpu"))],
        )
        a = Projections(FAMILIES["rademacher"], 4, 0, draw, "projection", places[0]).of(places[0][0])
        b = Projections(FAMILIES["rademacher"], 9, 0, draw, "co-projection", places[1]).of(places[1][0])
        left, right = reconstruct(gradient @ a.T, b @ gradient, b)
        torch.testing.assert_close(left @ right, gradient, rtol=1e-4, atol=1e-5)
        step = row_adam(left, torch.zeros(20), 1) @ right
        assert float(step[3].norm()) > 1.0
        step[3] = 0.0
        assert not step.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_of_two_groups_are_uncorrelated_in_every_family(family):
    """The mean product of A_1^T A_1 - I and A_2^T A_2 - I, over 600 draws, within 5 standard errors of 0."""
    places = [Group(label, 16, torch.float64, torch.device("cpu")) for label in ("one", "other")]
    products, squares = [], []
    for draw in range(600):
        drawn = Projections(FAMILIES[family], 4, 5, draw, "projection", places)
        one, other = (drawn.of(place).T @ drawn.of(place) - torch.eye(16) for place in places)
        products.append((one * other).sum())
        squares.append(one.square().sum())
    correlation = torch.stack(products) / torch.stack(squares).mean()
    error = float(correlation.std()) / 600**0.5
    # Two equal offsets of 16 leave what the diagonals share of a sixteenth of the draws.
    shared = {"gaussian": 0.06, "stiefel": 0.06, "coordinate": 1.0}.get(family, 0.0) / 16
    assert abs(float(correlation.mean()) - shared) < 5 * error + 0.01 * (shared > 0) and error < 0.03


def test_layers_in_another_precision_do_not_share():
    """q under autocast, k of the same x outside of it: k's sketch is a float32 one."""
    model = nn.ModuleDict({"q": nn.Linear(64, 8, bias=False), "k": nn.Linear(64, 8, bias=False)})
    layers = SketchedLayers(model, select_targets(model, ["q", "k"]), 4, 0)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        q = model["q"](x)
    (q.float().sum() + model["k"](x).sum()).backward()
    expected = torch.ones(16, 8).T @ x @ layers.projection("k").T
    found = layers.parameters["k"].grad
    assert found is not None and float((found - expected).norm() / expected.norm()) < 1e-6


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from src.sketch import sketching
dist.init_process_group("gloo")
model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in ("both", "one", "none")})
before = {name: layer.weight.detach().clone() for name, layer in model.items()}
with sketching(model, ["both", "one", "none"], 4, 0.1, weight_decay=0.5, unreached=sys.argv[1]) as optimizer:
    for name in ("both", "one") if dist.get_rank() == 0 else ("both",):
        model[name](torch.ones(2, 8)).sum().backward()
    try:
        optimizer.average()
        optimizer.step()
    except RuntimeError as error:
        optimizer.zero_grad()
        print("refused", error)
print({name: bool((layer.weight != before[name]).any()) for name, layer in model.items()})
dist.destroy_process_group()
"""


@pytest.mark.parametrize("unreached", ["skip", "raise"])
def test_the_mean_over_processes_of_layers_that_not_all_reached(unreached, tmp_path):
    """What nobody reached stays, decay included; where some did, all skip or all raise, and nobody waits."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launcher, str(tmp_path / "script.py"), unreached],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert ended.returncode == 0, ended.stderr
    if unreached == "skip":
        assert ended.stdout.count("{'both': True, 'one': True, 'none': False}") == 2
    else:
        assert ended.stdout.count("a gradient reached a target in 1 of 2 processes") == 2
        assert ended.stdout.count("{'both': False, 'one': False, 'none': False}") == 2


def test_a_learning_rate_ratio_of_narrow_weights_is_exact():
    """The weights' norm is taken in float32: bfloat16's would be off by a quarter of a per cent."""
    model = mlp(torch.bfloat16)
    layers = SketchedLayers(model, select_targets(model, ["up", "down"]), 4, 0)
    optimizer = SketchOptimizer(layers, 1e-3, lr_is="ratio", clip_norm="none")
    for parameter in layers.sketch_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.propose()
    found = optimizer._norm({name: (d.left_MR, d.right_RN) for name, d in optimizer._proposed().items()})
    whole = torch.stack([m.weight.double().norm() for m in layers.modules.values()]).norm()
    assert found / float(whole) == pytest.approx(1e-3, rel=1e-6)
