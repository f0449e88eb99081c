"""The controlled step between two probes, and of methods whose step cannot be split."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from src.probe import ControlledStep
from src.sketch.optimizer import SketchOptimizer
from src.trainer import accumulate
from tests.test_trainer import build, phase, scored, setup


def run(
    config: Any, policy: Any, task: Any, method: Any, step: ControlledStep, updates: range
) -> list[dict[str, float]]:
    rows = []
    for update in updates:
        batch = scored(config, policy, task, update)
        step.look(batch, update)
        accumulate(config, policy, batch, None, phase)
        method.propose()
        rows.append(step.make(batch, update))
    return rows


@pytest.mark.parametrize("method", ["sketch", "dense"])
def test_between_two_probes_the_prediction_grows_with_the_squared_norm(method):
    config, policy, task = setup(f"method={method}", "control=fixed", "control.budget=1e-9", "control.probe_every=3")
    optimizer = build(config, policy)
    step = ControlledStep(config, policy, optimizer, phase)
    norms = []
    norm = optimizer.displacement_norm
    optimizer.displacement_norm = lambda: norms.append(norm()) or norms[-1]
    rows = run(config, policy, task, optimizer, step, range(1, 6))
    assert [row["control/probed"] for row in rows] == [1, 0, 0, 1, 0]
    assert ["control/realised_kl" in row for row in rows] == [True, False, False, True, False]
    assert len(norms) == 5
    for update, since in ((2, 1), (3, 1), (5, 4)):
        carried = rows[since - 1]["control/proposed_kl"] * (norms[update - 1] / norms[since - 1]) ** 2
        assert rows[update - 1]["control/proposed_kl"] == pytest.approx(carried, rel=1e-9)
    for row in rows:  # the budget holds by what is known
        assert row["control/binds"] == 1.0 and row["control/predicted_kl"] == pytest.approx(1e-9)


def test_the_carried_prediction_is_near_the_real_one():
    """Along one direction, at three times the learning rate: nine times the divergence."""
    found, direction = {}, ["method.refresh_every=never", "method.direction=sgd"]
    for every in (1, 2):
        config, policy, task = setup("control=fixed", "control.budget=1", f"control.probe_every={every}", *direction)
        optimizer = build(config, policy)
        step = ControlledStep(config, policy, optimizer, phase)
        for update, rate in ((1, 1e-7), (2, 3e-7)):
            batch = scored(config, policy, task, 1)
            for group in optimizer.param_groups:
                group["lr"] = rate
            accumulate(config, policy, batch, None, phase)
            optimizer.propose()
            found[every] = step.make(batch, update)["control/proposed_kl"]
    assert found[2] == pytest.approx(found[1], rel=0.01)


def test_without_control_there_is_nothing_between_two_probes():
    config, policy, task = setup("control=none", "control.probe_every=2")
    optimizer = build(config, policy)
    rows = run(config, policy, task, optimizer, ControlledStep(config, policy, optimizer, phase), range(1, 4))
    assert [sorted(row) == sorted(rows[0]) for row in rows] == [True, False, True]
    assert not {"control/proposed_kl", "control/predicted_kl", "control/realised_kl"} & set(rows[1])
    assert rows[1]["control/step_scale"] == 1.0


def test_a_resumed_step_goes_on_from_the_last_probe():
    config, policy, task = setup("control=fixed", "control.budget=1e-9", "control.probe_every=4")
    straight = build(config, policy)
    step = ControlledStep(config, policy, straight, phase)
    run(config, policy, task, straight, step, range(1, 3))
    state, kept = step.state(), deepcopy(policy.model.state_dict())
    method_state = deepcopy(straight.state_dict())
    expected = run(config, policy, task, straight, step, range(3, 4))
    config, policy, task = setup("control=fixed", "control.budget=1e-9", "control.probe_every=4")
    resumed = build(config, policy)
    policy.model.load_state_dict(kept)
    resumed.load_state_dict(method_state)
    step = ControlledStep(config, policy, resumed, phase)
    step.load_state(state)
    assert run(config, policy, task, resumed, step, range(3, 4)) == expected


class Whole:
    """A method without a norm of its proposal."""

    def __init__(self, inner: Any):
        self._inner = inner
        self.param_groups = inner.param_groups
        for name in ("propose", "tangents", "apply"):
            setattr(self, name, getattr(inner, name))


def test_a_method_without_a_norm_is_probed_at_every_update_under_control():
    for control, probed in (("fixed", [1, 1, 1]), ("none", [1, 0, 0])):
        config, policy, task = setup(f"control={control}", "control.probe_every=5")
        method: Any = Whole(build(config, policy))
        rows = run(config, policy, task, method, ControlledStep(config, policy, method, phase), range(1, 4))
        assert [row["control/probed"] for row in rows] == probed


class Unsplit(Whole):
    """A method that steps where nobody can look in between: here in backward's place, in `propose`."""

    splits = False

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.apply = lambda scale: None
        self.propose = lambda: (inner.propose(), inner.apply(1.0))[0]
        self.tangents = lambda: pytest.fail("nothing can be predicted")


def test_a_step_that_cannot_be_split_is_measured_against_the_policy_before_it():
    found = {}
    for kind in ("split", "unsplit"):
        config, policy, task = setup("control=none", "control.probe_every=1")
        method: Any = build(config, policy)
        if kind == "unsplit":
            method = Unsplit(method)
        found[kind] = run(config, policy, task, method, ControlledStep(config, policy, method, phase), range(1, 3))
    for split, unsplit in zip(found["split"], found["unsplit"], strict=True):
        assert unsplit["control/realised_kl"] == pytest.approx(split["control/realised_kl"], rel=1e-3)
        assert "control/proposed_kl" not in unsplit and unsplit["control/step_scale"] == 1.0


def test_a_sketch_s_norm_is_that_of_the_displacement_in_expectation():
    config, policy, task = setup("method.rank=4", "control=none")
    optimizer = build(config, policy)
    assert isinstance(optimizer, SketchOptimizer)
    ratios = []
    for update in range(1, 9):
        accumulate(config, policy, scored(config, policy, task, update), None, phase)
        optimizer.propose()
        squares: list[Tensor] = []
        for name, displacement in optimizer._proposed().items():
            squares.append((displacement.left_MR @ optimizer.layers.projection(name)).square().sum())
        ratios.append(optimizer.displacement_norm() / float(torch.stack(squares).sum().sqrt()))
        optimizer.apply(1.0)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.1)


def test_a_dense_norm_is_that_of_the_displacement():
    config, policy, task = setup("method=dense", "method.weight_decay=0.1", "control=none")
    optimizer = build(config, policy)
    accumulate(config, policy, scored(config, policy, task), None, lambda *names: nullcontext())
    optimizer.propose()
    norm, before = optimizer.displacement_norm(), deepcopy(policy.model.state_dict())
    optimizer.apply(1.0)
    moved = [(value - before[name]).square().sum() for name, value in policy.model.state_dict().items()]
    assert norm == pytest.approx(float(torch.stack(moved).sum().sqrt()), rel=1e-3)
