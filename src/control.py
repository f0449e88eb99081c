"""Budgets on the predicted divergence of an update, and the step scale that keeps it."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "inverse_sqrt", "exponential"]


def decayed_budget(start: float, end: float, horizon: int, schedule: Schedule, update: int) -> float:
    """Return the budget of an update (from 0), nats per token; it falls from `start` to `end` and then stays.

    With x = min(update / horizon, 1):
        cosine:       end + (start - end) (1 + cos(pi x)) / 2        arXiv 2610.06647: 2e-4 to 2e-5 over 300 updates
        linear:       start + (end - start) x
        exponential:  start (end / start)^x
        inverse_sqrt: start / sqrt(1 + x ((start / end)^2 - 1))      so that it also ends at `end`
    """
    if update >= horizon:
        return end
    x = update / horizon
    match schedule:
        case "cosine":
            return end + (start - end) * (1.0 + math.cos(math.pi * x)) / 2.0
        case "linear":
            return start + (end - start) * x
        case "exponential":
            return start * (end / start) ** x
        case "inverse_sqrt":
            return start / math.sqrt(1.0 + x * ((start / end) ** 2 - 1.0))


def step_scale(predicted: float, budget: float | None, maximum: float) -> float:
    """Return min(maximum, sqrt(budget / predicted)): the largest step whose predicted divergence keeps the budget.

    The prediction is quadratic in the scale. Without a budget the scale is 1. A prediction of 0 gives 1 (the
    update does nothing that could be scaled), never the maximum.

    Raises:
        FloatingPointError: the prediction is negative, infinite or NaN: such an update must not be made.
    """
    if not 0.0 <= predicted < math.inf:
        raise FloatingPointError(f"the predicted divergence is {predicted}; no update was made")
    if budget is None or predicted == 0.0:
        return 1.0
    return min(maximum, math.sqrt(budget / predicted))
