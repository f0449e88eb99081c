"""Does a series of numbers grow? numpy and scipy only; the reading half uses it too."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM_RATE = 0.02
"""The share of series without a trend that may be called growing; more and the alarms of a grid are not read."""

MATTERS = 0.001
"""Growth per 100 updates, relative to the series' median, below which it is called not growing: at 0.1% a run of 10,000
updates ends 10% higher. So 1 MiB an update matters up to peaks of 100 GiB."""

FEWEST_POINTS = 10
"""With fewer a rise of five standard deviations is mostly missed, and the correction for autocorrelation is a guess."""

GROWTH_DEFINITION = (
    f"growing: the Mann-Kendall test for a rise has p below {FALSE_ALARM_RATE:g} (one-sided, corrected for "
    f"autocorrelation) and the Theil-Sen slope is at least {MATTERS:.1%} of the median per 100 updates; "
    f"too few points: fewer than {FEWEST_POINTS}"
)


class Growth(NamedTuple):
    """What the test says of a series. Slopes are in its unit per update; NaN where there are too few points."""

    verdict: str  # "growing", "not growing" or "too few points"
    slope: float  # Theil-Sen: the median of the slopes between all pairs of points
    low: float  # confidence interval of the slope; growth is tested on one side of it at FALSE_ALARM_RATE
    high: float
    p: float  # of a rise at least as clear without a trend, one-sided
    relative: float  # slope per 100 updates over the median of the series
    points: int


def growth(values: Sequence[float] | NDArray[np.float64], updates: Sequence[float] | NDArray[np.float64]) -> Growth:
    """Return whether `values` grow with `updates`, which need not be evenly spaced; those not finite are left out.

    Slope and interval are Sen's (J. Am. Stat. Assoc. 63, 1968); the test is that of Mann (Econometrica 13, 1945) and
    Kendall, with ties. Both take points for independent, which lengths of responses, and so peaks, are not: with an
    autocorrelation r between neighbours (of what the line leaves over) n points are worth n (1 - r) / (1 + r). The
    test's z is reduced accordingly and taken for Student's with that many points less two; the interval alike. Not so
    where nearly all differences between neighbours are rises (sign test): noise that returns to its mean has as many
    falls, and what the line leaves over is then a bend or steps of the growth itself.

    Simulated (tests/test_stats.py): of series of 10 to 100 points without a trend at most 2.2% are called growing, be
    they independent, skewed, with ties or autocorrelated up to 0.7. A rise by a fifth of the noise's standard deviation
    per update is found in 88% of series of 20 independent points and in 98% of 25, by a tenth in 97% of 30. With an
    autocorrelation of 0.5 it is 39%, 54% and 38%.

    Raises:
        ValueError: the two differ in length.
    """
    from scipy import stats

    values_T, updates_T = np.asarray(values, dtype=float), np.asarray(updates, dtype=float)
    if len(values_T) != len(updates_T):
        raise ValueError(f"{len(values_T)} values of {len(updates_T)} updates: each value needs its update")
    finite = np.isfinite(values_T)
    values_T, updates_T = values_T[finite], updates_T[finite]
    points = len(values_T)
    if points < FEWEST_POINTS:
        return Growth("too few points", math.nan, math.nan, math.nan, math.nan, math.nan, points)
    if np.ptp(values_T) == 0:  # the test has no variance there
        return Growth("not growing", 0.0, 0.0, 0.0, 1.0, 0.0, points)
    order = np.argsort(updates_T, kind="stable")
    values_T, updates_T = values_T[order], updates_T[order]
    slope = float(stats.theilslopes(values_T, updates_T).slope)
    differences_T = np.diff(values_T)
    rises, moves = int((differences_T > 0).sum()), int((differences_T != 0).sum())
    climbs = stats.binomtest(rises, moves, alternative="greater").pvalue < FALSE_ALARM_RATE
    widening = 1.0 if climbs else _variance_widening(values_T - slope * updates_T)
    freedom = max(1.0, points / widening - 2)
    # The interval asked for is the normal one that is as wide as Student's, widened; at 8 it has every slope in it.
    width = min(8.0, stats.t.isf(FALSE_ALARM_RATE, freedom) * math.sqrt(widening))
    interval = stats.theilslopes(values_T, updates_T, alpha=1 - 2 * stats.norm.sf(width))
    rise = stats.kendalltau(updates_T, values_T, method="asymptotic", alternative="greater")
    p = float(stats.t.sf(stats.norm.isf(rise.pvalue) / math.sqrt(widening), freedom))
    middle = abs(float(np.median(values_T)))
    relative = 100 * slope / middle if middle else math.copysign(math.inf, slope) if slope else 0.0
    verdict = "growing" if p < FALSE_ALARM_RATE and relative >= MATTERS else "not growing"
    return Growth(verdict, slope, float(interval.low_slope), float(interval.high_slope), p, relative, points)


def updates_to_cap(slope: float, last: float, cap: float) -> float:
    """Return after how many more updates a series that is at `last` and grows by `slope` an update reaches `cap`.

    0 where it is there already, infinity where it does not grow.
    """
    if last >= cap:
        return 0.0
    return (cap - last) / slope if slope > 0 else math.inf


def _variance_widening(residuals_T: NDArray[np.float64]) -> float:
    """Return (1 + r) / (1 - r), at least 1, for the autocorrelation r of neighbours.

    A line fitted to n points makes r come out lower by about (2 + 4 r) / n, which is taken back.
    """
    n = len(residuals_T)
    centred_T = residuals_T - residuals_T.mean()
    square = float(centred_T @ centred_T) or 1.0
    r = (float(centred_T[:-1] @ centred_T[1:]) / square + 2 / n) / (1 - 4 / n)
    r = min(max(0.0, r), 0.9)
    return (1 + r) / (1 - r)
