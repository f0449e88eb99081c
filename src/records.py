"""A memory number as a typed record, and what one method saves over another. Standard library and numpy only.

"Peak memory" without more words is no number: a mean over updates, a maximum over them and the worst instant of all
seeds differ by more than methods do. A `MemoryRecord` says which it is, of what, over which updates and seeds, on which
hardware and under which settings; `saving` subtracts only records that agree in all of that.

Shapes: U measured updates, S seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from src.identity import BOOKKEEPING, leaves

PHASES = ("data", "rollout", "reward", "reference", "forward", "backward", "reduce", "probe", "step", "tracking")
"""The phases of an update, disjoint, in their order; "update" stands for the whole."""

COMPONENTS = (
    "weights",  # of the model: parameters and buffers, adapters included
    "master_weights",  # float32 copies of narrower weights
    "reference",  # the model that the loss's divergence is taken from
    "gradients",  # dense ones, as autograd accumulates them
    "sketches",  # of gradients, and the directions made from them
    "projections",  # random matrices, bases of subspaces
    "optimizer_state",  # moments
    "activations",  # made while gradients are recorded, and kept: saved for backward, recomputed ones included
    "logits",  # logits, log-probabilities, and what is computed from them in the loss and its gradient
    "probe",  # all that predicting and measuring the divergence makes
    "kv_cache",  # keys and values of the rollout
    "communication",  # buffers of collectives
    "other",  # what is left: temporaries, tokens, and on CUDA what the allocator holds beyond the ledger
)
"""What bytes are of, at an instant; together they are all bytes."""


class Statistic(NamedTuple):
    """What becomes of the updates of several seeds: how seeds are put together, and all of it in a sentence."""

    over_seeds: str
    definition: str


DEFINITIONS = {
    "time mean": Statistic(
        "mean",
        "Bytes alive averaged over time: the sum of byte-seconds over the sum of seconds of the same updates, for each "
        "seed, then the mean over seeds.",
    ),
    "mean of update peaks": Statistic(
        "mean", "The highest bytes of each update, averaged over the updates of each seed, then over seeds."
    ),
    "maximum of update peaks": Statistic(
        "mean", "The highest bytes of all updates of each seed, then the mean over seeds."
    ),
    "maximum of the seed-mean curve": Statistic(
        "mean before the maximum",
        "The highest bytes of each update, averaged over seeds at that update, then the maximum over updates.",
    ),
    "worst instant": Statistic(
        "maximum", "The highest bytes of any update of any seed: what the machine must have for all of them."
    ),
}
"""The statistics over time, by the name that a record has in `over_time`. The updates that count are the measured ones
that all seeds have."""

_NOT_COMPARED = {"method", "control", "seed", *BOOKKEEPING} - {"threads", "device"}


class NotComparable(ValueError):
    """Two memory numbers that must not be subtracted; the message is the first reason, in a sentence."""


@dataclass(frozen=True)
class Includes:
    """What the bytes of a record count: of the tensors, and of the updates."""

    tensors: tuple[str, ...]  # memory_includes of run.json
    updates: tuple[int, ...]  # the measured ones that count
    includes_optimizer_creation: bool = True  # the first update, in which state that is made lazily appears
    includes_first_after_resume: bool = True  # in which a checkpoint's state was there before the first forward


@dataclass(frozen=True)
class MemoryRecord:
    """A number of bytes and all that must be said of it. A value of NaN: the run did not record it."""

    value_bytes: float
    quantity: str  # bytes in use | reserved bytes: `includes` says what is counted
    phase: str  # update | one of PHASES
    over_time: str  # one of DEFINITIONS
    over_seeds: str  # as DEFINITIONS has it
    scope: str  # whose bytes: one process on one device, e.g. "process on cpu"
    unit: str
    includes: Includes
    seeds: tuple[int, ...]
    hardware: Mapping[str, Any] = field(hash=False)
    settings: Mapping[str, Any] = field(hash=False)  # as `compared_settings` has them
    components: Mapping[str, float] = field(hash=False)  # sum to the value; empty where there is no split


@dataclass(frozen=True)
class Unmeasured:
    """Runs that ended before there was a number: an out-of-memory is an outcome, not a size."""

    status: str  # out_of_memory | failed | ...
    phase: str | None = None
    wanted_bytes: int | None = None
    cap_bytes: int | None = None
    error: str | None = None  # its type

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        facts = []
        if self.wanted_bytes is not None:
            cap = "" if self.cap_bytes is None else f" of cap {readable(self.cap_bytes)}"
            facts = [f"wanted {readable(self.wanted_bytes)}{cap}"]
        elif self.error and self.status != "out_of_memory":
            facts = [self.error]
        return f"unmeasurable: {self.status}{where}" + "".join(f" ({fact})" for fact in facts)


@dataclass(frozen=True)
class Saving:
    """What a record has less than a baseline's; negative where it has more."""

    fraction: float  # of the baseline
    saved_bytes: float
    by_component: dict[str, float]  # sum to saved_bytes; empty where one of the two has no split
    mostly_activations: bool  # activations and logits are over half of it; gradients, optimizer state, masters are not


@dataclass(frozen=True)
class Series:
    """The measured updates of one seed, for one quantity and phase. NaN in what was not recorded."""

    seed: int
    updates_U: NDArray[np.int64]
    peak_bytes_U: NDArray[np.float64]
    byte_seconds_U: NDArray[np.float64]
    seconds_U: NDArray[np.float64]
    component_bytes: Mapping[str, NDArray[np.float64]]  # each (U,), together the peaks; empty where there is no split

    def at(self, updates: Sequence[int]) -> "Series":
        """Return the series of these updates, each of which it must have."""
        rows = np.searchsorted(self.updates_U, updates)
        return Series(
            self.seed,
            self.updates_U[rows],
            self.peak_bytes_U[rows],
            self.byte_seconds_U[rows],
            self.seconds_U[rows],
            {name: bytes_U[rows] for name, bytes_U in self.component_bytes.items()},
        )


def measure(series: Sequence[Series], over_time: str, **about: Any) -> MemoryRecord:
    """Return one statistic of the updates that all of `series`, one a seed, have, with its bytes by component.

    Args:
        over_time: one of DEFINITIONS. Of "time mean" there is no split.
        about: the other fields of the record; its `includes` is given the updates that count.
    """
    common = sorted(set.intersection(*(set(one.updates_U.tolist()) for one in series))) if series else []
    aligned = [one.at(common) for one in series]
    value, components = _statistic(aligned, over_time) if common else (math.nan, {})
    includes = replace(about.pop("includes"), updates=tuple(common))
    return MemoryRecord(
        value_bytes=value,
        over_time=over_time,
        over_seeds=DEFINITIONS[over_time].over_seeds,
        unit="bytes",
        includes=includes,
        seeds=tuple(one.seed for one in series),
        components=components,
        **about,
    )


def _statistic(series: Sequence[Series], over_time: str) -> tuple[float, dict[str, float]]:
    """Return the statistic and its bytes by component, those of the updates that it is taken from."""
    if over_time == "time mean":
        return float(np.mean([_time_mean(one) for one in series])), {}
    peaks_SU = np.stack([one.peak_bytes_U for one in series])
    taken_SU = np.zeros(peaks_SU.shape, dtype=bool)
    match over_time:
        case "mean of update peaks":
            taken_SU[:] = True
        case "maximum of update peaks":
            taken_SU[np.arange(len(series)), peaks_SU.argmax(axis=1)] = True
        case "maximum of the seed-mean curve":
            taken_SU[:, peaks_SU.mean(axis=0).argmax()] = True
        case "worst instant":
            taken_SU[np.unravel_index(peaks_SU.argmax(), peaks_SU.shape)] = True
        case _:
            raise KeyError(over_time)

    names = set.intersection(*(set(one.component_bytes) for one in series))
    split = {
        name: float(np.stack([one.component_bytes[name] for one in series])[taken_SU].mean())
        for name in COMPONENTS
        if name in names
    }
    return float(peaks_SU[taken_SU].mean()), split


def _time_mean(one: Series) -> float:
    known_U = np.isfinite(one.byte_seconds_U) & np.isfinite(one.seconds_U)
    seconds = one.seconds_U[known_U].sum()
    return one.byte_seconds_U[known_U].sum() / seconds if seconds > 0 else math.nan


def saving(ours: MemoryRecord | Unmeasured, baseline: MemoryRecord | Unmeasured) -> Saving:
    """Return what `ours` saves over `baseline`, which must be the same statistic of the same thing.

    Raises:
        NotComparable: one of the two has no number, or they differ in anything but method and control.
    """
    for whose, record in (("baseline", baseline), ("ours", ours)):
        if isinstance(record, Unmeasured):
            raise NotComparable(f"{whose} {record}")
    assert isinstance(ours, MemoryRecord) and isinstance(baseline, MemoryRecord)
    for name in ("quantity", "phase", "over_time", "over_seeds", "scope", "unit"):
        _same(name, getattr(ours, name), getattr(baseline, name))
    _same("what the bytes include", ours.includes.tensors, baseline.includes.tensors)
    for name in ("includes_optimizer_creation", "includes_first_after_resume"):
        _same(name, getattr(ours.includes, name), getattr(baseline.includes, name))
    _same_keys("hardware", ours.hardware, baseline.hardware)
    _same_keys("setting", ours.settings, baseline.settings)
    _same("the set of seeds", ours.seeds, baseline.seeds)
    if ours.includes.updates != baseline.includes.updates:
        _same("the set of updates", spans(ours.includes.updates), spans(baseline.includes.updates))
    for whose, record in (("the baseline's", baseline), ("our", ours)):
        if not math.isfinite(record.value_bytes):
            raise NotComparable(f"{whose} {record.over_time} was not recorded")
    if baseline.value_bytes <= 0:
        raise NotComparable(f"the baseline's {baseline.over_time} is {baseline.value_bytes:g} bytes: nothing to save")
    saved = baseline.value_bytes - ours.value_bytes
    by_component = {}
    if ours.components and baseline.components:
        names = [name for name in COMPONENTS if name in ours.components or name in baseline.components]
        by_component = {name: baseline.components.get(name, 0.0) - ours.components.get(name, 0.0) for name in names}

    def more_than_half(*names: str) -> bool:
        return sum(by_component.get(name, 0.0) for name in names) > saved / 2 > 0

    trained = more_than_half("gradients", "optimizer_state", "master_weights")
    mostly_activations = more_than_half("activations", "logits") and not trained
    return Saving(saved / baseline.value_bytes, saved, by_component, mostly_activations)


def compared_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that two arms must share, by dotted key.

    All but the method's and the control's own, the seed, and where and how a run is kept.
    """
    return dict(leaves({key: value for key, value in config.items() if key not in _NOT_COMPARED}))


def spans(updates: Sequence[int]) -> str:
    """Return updates in words: `3 of 1 to 10`."""
    return f"{len(updates)} of {updates[0]} to {updates[-1]}" if updates else "none"


def readable(count: float) -> str:
    """Return 512 B, 1.5 KiB, 56.3 MiB, 1.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1023.95 or (unit == "B" and abs(count) < 1024):
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _same(what: str, ours: Any, baseline: Any) -> None:
    if ours != baseline:
        raise NotComparable(f"not comparable: {what} differs: {_in_words(ours)}, the baseline's {_in_words(baseline)}")


def _same_keys(what: str, ours: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    for key in sorted({*ours, *baseline}):
        _same(f"{what} {key}", ours.get(key, "not there"), baseline.get(key, "not there"))


def _in_words(value: Any) -> str:
    return (", ".join(map(str, value)) or "not recorded") if isinstance(value, tuple) else str(value)
