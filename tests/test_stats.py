"""The growth test: what it finds, and how often noise alone sets it off (simulated with fixed seeds)."""

import math

import numpy as np
import pytest
from scipy import stats

from src.stats import FALSE_ALARM_RATE, FEWEST_POINTS, GROWTH_DEFINITION, growth, updates_to_cap

MIB = 2**20


def noise(kind: str, points: int, rng: np.random.Generator) -> np.ndarray:
    """Standard deviation 1, no trend."""
    if kind == "independent":
        return rng.normal(size=points)
    if kind == "skewed":  # the longest response of a batch
        return rng.lognormal(0, 1, size=points) / 2.16
    if kind == "ties":  # the longest response, most often truncated
        return np.minimum(rng.poisson(8, size=points), 9.0)
    echo = float(kind)
    values = np.zeros(points + 50)
    for place, fresh in enumerate(rng.normal(size=points + 50)):
        values[place] = echo * values[place - 1] + math.sqrt(1 - echo**2) * fresh
    return values[50:]


def share_growing(kind: str, points: int, rise: float, trials: int, spread: float = 5.0) -> float:
    """Of simulated peaks about 100 MiB, with noise of `spread` MiB, that rise by `rise` MiB an update."""
    rng = np.random.default_rng([points, trials])
    updates = np.arange(1, points + 1)
    found = 0
    for _ in range(trials):
        peaks = (100 + spread * noise(kind, points, rng) + rise * updates) * MIB
        found += growth(peaks, updates).verdict == "growing"
    return found / trials


@pytest.mark.parametrize("kind", ["independent", "skewed", "ties", "0.3", "0.5", "0.7"])
@pytest.mark.parametrize("points", [10, 25, 60])
def test_noise_alone_is_flagged_at_most_at_the_stated_rate(kind, points):
    trials = 300
    sampling_error = math.sqrt(FALSE_ALARM_RATE / trials)
    assert share_growing(kind, points, 0.0, trials) <= FALSE_ALARM_RATE + 2 * sampling_error


def test_the_rate_is_not_far_below_what_is_stated():
    """A test that never says growing would pass the one above."""
    assert share_growing("independent", 30, 0.0, 1000) > 0.004


@pytest.mark.parametrize(
    ("kind", "points", "spread", "least"),
    [("independent", 20, 5, 0.8), ("independent", 25, 5, 0.95), ("independent", 30, 10, 0.9), ("skewed", 25, 10, 0.85)],
)
def test_a_mebibyte_an_update_is_found_in_20_to_30_points(kind, points, spread, least):
    """F25, against noise of 5 or 10 MiB from the lengths of responses."""
    assert share_growing(kind, points, 1.0, 200, spread) >= least


def test_growth_slower_than_what_matters_is_none():
    updates = np.arange(1.0, 101)
    assert growth(1e9 + 1e4 * (updates % 2) + 11_000 * updates, updates).verdict == "growing"
    grows = growth(1e9 + 1e4 * (updates % 2) + 9_000 * updates, updates)
    assert grows.verdict == "not growing" and grows.p < 1e-6 and grows.relative == pytest.approx(9e-4, rel=1e-2)
    assert "0.1%" in GROWTH_DEFINITION and str(FEWEST_POINTS) in GROWTH_DEFINITION


def test_slope_and_p_are_scipys_where_neighbours_are_independent():
    """Alternating residuals: no correction beyond Student's distribution."""
    updates = np.arange(30.0)
    values = 3 * updates + 40 * (-1) ** updates + np.sin(updates**2)
    found = growth(values, updates)
    assert found.slope == stats.theilslopes(values, updates).slope
    z = stats.norm.isf(stats.kendalltau(updates, values, method="asymptotic", alternative="greater").pvalue)
    assert found.p == pytest.approx(stats.t.sf(z, 28))
    assert found.low < found.slope < found.high and (found.low > 0) == (found.p < FALSE_ALARM_RATE)


def test_uneven_updates_give_the_slope_per_update():
    updates = np.array([1, 2, 3, *range(10, 101, 10)])
    assert growth(7.0 * updates, updates).slope == 7.0
    shuffled = np.random.default_rng(0).permutation(len(updates))
    assert growth(7.0 * updates[shuffled], updates[shuffled]) == growth(7.0 * updates, updates)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_of_unequal_pieces_is_no_autocorrelation(seed):
    """What stays alive has no noise that returns to its mean: the steps and bends of a leak are growth."""
    leaked = np.random.default_rng(seed).exponential(size=20).cumsum()
    assert growth(100 + leaked, np.arange(20)).verdict == "growing"
    assert growth(np.arange(20.0) ** 2, np.arange(20)).verdict == "growing"
    assert growth(100 + np.arange(30) // 5, np.arange(30)).verdict == "growing", "at every evaluation"


def test_one_step_at_the_beginning_is_no_growth():
    """M34: the optimizer's state, which the first update makes."""
    assert growth([50.0, *[80.0] * 25], np.arange(26)).verdict == "not growing"


def test_falling_and_constant_series():
    falling = growth(-np.arange(20.0), np.arange(20))
    assert falling.verdict == "not growing" and falling.slope == -1 and falling.p > 0.9
    constant = growth([5.0] * 20, np.arange(20))
    assert (constant.verdict, constant.slope, constant.p) == ("not growing", 0.0, 1.0)


def test_too_few_points_give_no_number():
    values = [1.0] * 5 + [math.nan, math.inf] + [2.0] * (FEWEST_POINTS - 6)
    found = growth(values, range(len(values)))
    assert found.verdict == "too few points" and found.points == FEWEST_POINTS - 1 and math.isnan(found.slope)
    assert growth([], []).points == 0
    with pytest.raises(ValueError, match="2 values of 1 updates"):
        growth([1, 2], [1])


def test_updates_to_the_cap():
    assert updates_to_cap(2.0, 90.0, 100.0) == 5.0
    assert updates_to_cap(2.0, 100.0, 100.0) == updates_to_cap(-1.0, 101.0, 100.0) == 0.0
    assert updates_to_cap(0.0, 90.0, 100.0) == updates_to_cap(-1.0, 90.0, 100.0) == math.inf
