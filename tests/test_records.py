"""Typed memory numbers: the five statistics against loops in plain Python, and what may be subtracted."""

import math
from dataclasses import FrozenInstanceError, replace
from itertools import product
from statistics import fmean

import numpy as np
import pytest

from src.records import (
    COMPONENTS,
    DEFINITIONS,
    Includes,
    MemoryRecord,
    NotComparable,
    Series,
    Unmeasured,
    compared_settings,
    measure,
    readable,
    saving,
)

ABOUT = {
    "quantity": "bytes in use",
    "phase": "update",
    "scope": "process on cpu",
    "hardware": {"cpu": "one", "cores": "2"},
}
INCLUDES = Includes(("tracked tensors",), ())


def random_series(seeds: int = 3, updates: int = 7) -> list[Series]:
    """Bytes of two components, whole numbers, and seconds; the maxima of seeds are at different updates."""
    rng = np.random.default_rng(5)
    series = []
    for seed in range(seeds):
        split = {name: rng.integers(1, 1000, updates).astype(float) for name in ("weights", "activations")}
        seconds = rng.uniform(0.5, 2, updates)
        series.append(
            Series(seed, np.arange(1, updates + 1), sum(split.values()), 100 * rng.random(updates), seconds, split)
        )
    return series


def of(series: list[Series], over_time: str) -> MemoryRecord:
    return measure(series, over_time, includes=INCLUDES, settings={}, **ABOUT)


def record(value: float = 100.0, **fields) -> MemoryRecord:
    components = fields.pop("components", {"weights": value})
    about = {"over_time": "worst instant", "over_seeds": "maximum", "unit": "bytes", "seeds": (0, 1)} | ABOUT
    about |= {"includes": INCLUDES, "settings": {"model.name": "tiny", "microbatch_responses": 256}} | fields
    return MemoryRecord(value_bytes=value, components=components, **about)


def test_the_statistics_are_what_their_definitions_say():
    series = random_series()
    peaks = {(one.seed, int(u)): p for one in series for u, p in zip(one.updates_U, one.peak_bytes_U, strict=True)}
    seeds, updates = range(3), range(1, 8)
    expected = {
        "time mean": fmean(sum(one.byte_seconds_U) / sum(one.seconds_U) for one in series),
        "mean of update peaks": fmean(fmean(peaks[s, u] for u in updates) for s in seeds),
        "maximum of update peaks": fmean(max(peaks[s, u] for u in updates) for s in seeds),
        "maximum of the seed-mean curve": max(fmean(peaks[s, u] for s in seeds) for u in updates),
        "worst instant": max(peaks[s, u] for s, u in product(seeds, updates)),
    }
    found = {name: of(series, name).value_bytes for name in DEFINITIONS}
    assert found == pytest.approx(expected)
    assert len(set(found.values())) == 5, "the example tells them apart"
    assert found["maximum of the seed-mean curve"] < found["maximum of update peaks"] < found["worst instant"]


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name != "time mean"])
def test_the_components_are_those_of_the_statistics_own_instant(name):
    series = random_series()
    found = of(series, name)
    assert sum(found.components.values()) == pytest.approx(found.value_bytes)
    if name == "worst instant":
        worst = max(series, key=lambda one: one.peak_bytes_U.max())
        at = worst.peak_bytes_U.argmax()
        assert found.components == {part: worst.component_bytes[part][at] for part in ("weights", "activations")}
    if name == "maximum of update peaks":
        highest = [one.component_bytes["weights"][one.peak_bytes_U.argmax()] for one in series]
        assert found.components["weights"] == pytest.approx(fmean(highest))


def test_a_record_says_what_it_is():
    found = of(random_series(), "maximum of the seed-mean curve")
    assert (found.over_time, found.over_seeds, found.unit) == (
        "maximum of the seed-mean curve",
        "mean before the maximum",
        "bytes",
    )
    assert found.seeds == (0, 1, 2) and found.includes.updates == tuple(range(1, 8))
    with pytest.raises(FrozenInstanceError):
        found.value_bytes = 0.0
    for statistic in DEFINITIONS.values():
        assert statistic.definition.endswith(".") and statistic.definition.count(". ") == 0, "one sentence"


def test_only_updates_that_all_seeds_have_count():
    long, short = random_series(2)
    short = short.at([2, 4, 5])
    found = of([long, short], "worst instant")
    assert found.includes.updates == (2, 4, 5)
    assert found.value_bytes == max(*long.peak_bytes_U[[1, 3, 4]], *short.peak_bytes_U)


def test_what_was_not_recorded_is_nan_and_no_zero():
    one = random_series(1)[0]
    without = replace(one, byte_seconds_U=np.full(7, np.nan), component_bytes={})
    assert math.isnan(of([without], "time mean").value_bytes)
    assert of([without], "worst instant").components == {}
    assert math.isnan(of([], "worst instant").value_bytes)
    assert math.isnan(of([one.at([1]), replace(one, seed=1).at([2])], "worst instant").value_bytes), "none in common"
    partly = replace(one, byte_seconds_U=np.where(np.arange(7) < 3, one.byte_seconds_U, np.nan))
    assert of([partly], "time mean").value_bytes == sum(one.byte_seconds_U[:3]) / sum(one.seconds_U[:3])


def test_a_saving_is_the_difference_of_equal_records():
    ours = record(60.0, components={"weights": 10.0, "sketches": 5.0, "activations": 45.0})
    dense = record(100.0, components={"weights": 10.0, "gradients": 30.0, "activations": 60.0})
    saved = saving(ours, dense)
    assert (saved.fraction, saved.saved_bytes) == (0.4, 40.0)
    assert saved.by_component == {"weights": 0.0, "gradients": 30.0, "sketches": -5.0, "activations": 15.0}
    assert list(saved.by_component) == [name for name in COMPONENTS if name in saved.by_component]
    assert not saved.mostly_activations


def test_a_negative_saving_is_shown_as_it_is():
    saved = saving(record(150.0), record(100.0))
    assert (saved.fraction, saved.saved_bytes, saved.by_component) == (-0.5, -50.0, {"weights": -50.0})
    assert not saved.mostly_activations


@pytest.mark.parametrize(
    ("saved", "flag"),
    [
        ({"activations": 6.0, "gradients": 4.0}, True),
        ({"activations": 3.0, "logits": 3.0, "gradients": 4.0}, True),
        ({"activations": 4.0, "gradients": 6.0}, False),
        ({"activations": 5.0, "other": 5.0}, False),  # half is not over half
        ({"activations": 7.0, "gradients": 6.0, "sketches": -3.0}, False),  # both are over half
        ({"activations": 7.0, "optimizer_state": 3.0, "master_weights": 3.0, "sketches": -3.0}, False),
        ({"activations": -6.0, "gradients": -4.0}, False),  # nothing is saved
        ({}, False),
    ],
)
def test_a_saving_that_is_activations_is_flagged(saved, flag):
    """M17."""
    dense = {name: 100.0 for name in saved}
    ours = {name: 100.0 - count for name, count in saved.items()}
    value = 100.0 * max(1, len(saved))
    pair = record(value - sum(saved.values()), components=ours), record(value, components=dense)
    assert saving(*pair).mostly_activations is flag


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantity": "reserved bytes"}, "quantity differs: reserved bytes, the baseline's bytes in use"),
        ({"phase": "step"}, "phase differs"),
        ({"over_time": "time mean"}, "over_time differs: time mean, the baseline's worst instant"),
        ({"over_seeds": "mean"}, "over_seeds differs"),
        ({"scope": "process on cuda"}, "scope differs"),
        ({"unit": "MiB"}, "unit differs"),
        ({"seeds": (0,)}, "the set of seeds differs: 0, the baseline's 0, 1"),
        ({"includes": replace(INCLUDES, tensors=())}, "what the bytes include differs: not recorded, the"),
        ({"includes": replace(INCLUDES, includes_optimizer_creation=False)}, "includes_optimizer_creation differs"),
        ({"includes": replace(INCLUDES, includes_first_after_resume=False)}, "includes_first_after_resume differs"),
        (
            {"includes": replace(INCLUDES, updates=(1, 2))},
            "the set of updates differs: 2 of 1 to 2, the baseline's none",
        ),
        ({"hardware": {"cpu": "two", "cores": "2"}}, "hardware cpu differs: two, the baseline's one"),
        ({"settings": {"model.name": "tiny"}}, "setting microbatch_responses differs: not there, the baseline's 256"),
    ],
)
def test_what_differs_is_not_subtracted(fields, reason):
    """M14: and both ways round."""
    for pair in ((record(**fields), record()), (record(), record(**fields))):
        with pytest.raises(NotComparable) as refused:
            saving(*pair)
        assert str(refused.value).startswith("not comparable: ") and "\n" not in str(refused.value)
        assert reason.split(":")[0] in str(refused.value)
    with pytest.raises(ValueError, match=reason):
        saving(record(**fields), record())


def test_every_field_of_a_record_is_compared_or_the_number_itself():
    """A field that is added later must be compared, too."""
    compared = {
        "quantity",
        "phase",
        "over_time",
        "over_seeds",
        "scope",
        "unit",
        "includes",
        "seeds",
        "hardware",
        "settings",
    }
    assert set(MemoryRecord.__dataclass_fields__) == compared | {"value_bytes", "components"}


def test_an_out_of_memory_is_no_number():
    ended = Unmeasured("out_of_memory", "backward", 12 << 20, 100 << 20, "MemoryCapExceeded")
    with pytest.raises(NotComparable) as refused:
        saving(record(), ended)
    assert str(refused.value) == "baseline unmeasurable: out_of_memory in backward (wanted 12.0 MiB of cap 100.0 MiB)"
    with pytest.raises(NotComparable, match="^ours unmeasurable: failed in step .ValueError.$"):
        saving(Unmeasured("failed", "step", error="ValueError"), record())
    assert str(Unmeasured("out_of_memory", "step", 5)) == "unmeasurable: out_of_memory in step (wanted 5 B)"
    assert str(Unmeasured("out_of_memory")) == "unmeasurable: out_of_memory"
    with pytest.raises(NotComparable, match="the baseline's worst instant was not recorded"):
        saving(record(), record(math.nan))
    with pytest.raises(NotComparable, match="our worst instant was not recorded"):
        saving(record(math.nan), record())


def test_settings_are_compared_but_for_the_methods_and_where_a_run_lies():
    config = {
        "seed": 0,
        "root": "a",
        "study": "b",
        "device": "cpu",
        "method": {"rank": 4},
        "control": {"name": "none"},
        "model": {"name": "tiny"},
        "memory": {"cap_bytes": None, "every": 4},
        "checkpoint": {"every": 5},
    }
    assert compared_settings(config) == {
        "device": "cpu",
        "model.name": "tiny",
        "memory.cap_bytes": None,
        "memory.every": 4,
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (-5 * 2**30, "-5.0 GiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert readable(count) == text


def test_the_ledger_has_the_same_components():
    from src import memory

    assert set(memory.COMPONENTS) == set(COMPONENTS)
