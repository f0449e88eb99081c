"""Budget schedules and the step scale that keeps a budget."""

import math

import pytest

from src.control import decayed_budget, step_scale

START, END, HORIZON = 2e-4, 2e-5, 300
SCHEDULES = ("cosine", "linear", "inverse_sqrt", "exponential")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_starts_ends_and_stays(schedule):
    assert decayed_budget(START, END, HORIZON, schedule, 0) == pytest.approx(START, rel=1e-12)
    for update in (HORIZON, HORIZON + 1, 10 * HORIZON):
        assert decayed_budget(START, END, HORIZON, schedule, update) == pytest.approx(END, rel=1e-12)
    assert decayed_budget(START, END, 1, schedule, 1) == pytest.approx(END, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "quarter", "half"),
    [
        ("cosine", 2e-5 + 1.8e-4 * (1 + math.sqrt(0.5)) / 2, 1.1e-4),
        ("linear", 1.55e-4, 1.1e-4),
        ("exponential", 2e-4 * 10**-0.25, 2e-4 / math.sqrt(10)),  # geometric means
        ("inverse_sqrt", 2e-4 / math.sqrt(25.75), 2e-4 / math.sqrt(50.5)),  # 1 + 99 / 4 and 1 + 99 / 2
    ],
)
def test_a_schedules_inner_points(schedule, quarter, half):
    assert decayed_budget(START, END, HORIZON, schedule, HORIZON // 4) == pytest.approx(quarter, rel=1e-12)
    assert decayed_budget(START, END, HORIZON, schedule, HORIZON // 2) == pytest.approx(half, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_falls_strictly_and_keeps_its_bounds(schedule):
    values = [decayed_budget(START, END, HORIZON, schedule, update) for update in range(HORIZON + 1)]
    assert all(later < earlier for earlier, later in zip(values, values[1:], strict=False))
    assert min(values) >= END * (1 - 1e-12) and max(values) <= START * (1 + 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_ends_are_a_constant_budget(schedule):
    values = [decayed_budget(1e-3, 1e-3, 7, schedule, update) for update in range(10)]
    assert values == pytest.approx([1e-3] * 10, rel=1e-12)


@pytest.mark.parametrize(
    ("predicted", "budget", "maximum", "scale"),
    [
        (4e-4, 1e-4, 1.0, 0.5),
        (1e-4, 1e-4, 1.0, 1.0),
        (1e-4, 4e-4, 1.0, 1.0),  # a brake only
        (1e-4, 4e-4, 3.0, 2.0),  # and an accelerator
        (1e-8, 4e-4, 3.0, 3.0),
        (0.0, 1e-4, 3.0, 1.0),  # nothing to scale: never the maximum
        (1e-4, None, 3.0, 1.0),
        (0.0, None, 3.0, 1.0),
        (1e300, 1e-4, 1.0, 1e-152),
    ],
)
def test_the_step_scale(predicted, budget, maximum, scale):
    assert step_scale(predicted, budget, maximum) == pytest.approx(scale, rel=1e-12)


def test_the_scaled_prediction_keeps_the_budget():
    for predicted in (1e-9, 3e-5, 1e-4, 7.0):
        scale = step_scale(predicted, 1e-4, 3.0)
        assert 0 < scale <= 3.0
        assert scale**2 * predicted <= 1e-4 * (1 + 1e-12)


@pytest.mark.parametrize("predicted", [math.nan, math.inf, -math.inf, -1e-12])
@pytest.mark.parametrize("budget", [None, 1e-4])
def test_a_prediction_that_is_none_never_becomes_a_step(predicted, budget):
    with pytest.raises(FloatingPointError, match="no update was made"):
        step_scale(predicted, budget, 1.0)
