"""Run folders -> arms: the runs of a variant with what they say of memory, as typed records (`src/records.py`)."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.speed import warm_ups

if TYPE_CHECKING:
    import pandas as pd

    from src.records import MemoryRecord, Saving, Series, Unmeasured


class Run(NamedTuple):
    """A run's folder as far as memory goes."""

    id: str
    name: str
    seed: int
    status: str
    record: dict[str, Any]  # run.json
    config: dict[str, Any]  # config.yaml; empty where there is none
    rows: "pd.DataFrame"  # memory.jsonl by update, with the seconds of metrics.jsonl beside it
    evaluation_peak: float
    warm_ups: set[int]


class Arm(NamedTuple):
    """The runs of a variant, those that count for its numbers, and, if some ran out of memory, how that was."""

    name: str
    runs: list[Run]
    counted: list[Run]  # finished ones; without any the unfinished ones
    unmeasured: "Unmeasured | None"

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.counted]


def load_arms(runs: "pd.DataFrame") -> list[Arm]:
    """Return the arms of a study in the order of its runs, from the frame of `analysis.runs.load_runs`."""
    loaded = [_load(run) for run in runs.to_dict("records")]
    arms = []
    for name in dict.fromkeys(run.name for run in loaded):
        own = [run for run in loaded if run.name == name]
        with_rows = [run for run in own if len(run.rows)]
        counted = [run for run in with_rows if run.status == "finished"]
        counted = counted or [run for run in with_rows if run.status in ("running", "killed", "interrupted")]
        ended = [run for run in own if run.status == "out_of_memory"]
        ended = ended or [run for run in own if run.status == "failed" and not counted]
        arms.append(Arm(name, own, counted, _unmeasured(ended[0]) if ended else None))
    return arms


def series(run: Run, phase: str = "update", quantity: str = "bytes in use", steady: bool = False) -> "Series":
    """Return a run's measured updates; arguments as of `record`. Without a split the bytes of components are empty."""
    import numpy as np

    from src.records import COMPONENTS, Series

    prefix = "" if phase == "update" else f"{phase}_"
    kind = {"bytes in use": "", "reserved bytes": "reserved_"}[quantity]
    rows = run.rows[~run.rows.index.isin(run.warm_ups)] if steady else run.rows
    empty = np.full(len(rows), np.nan)

    def column(key: str) -> Any:
        return rows[key].to_numpy(dtype=float) if key in rows else empty

    peaks_U = column(f"memory/{prefix}peak_{kind}bytes")
    has_U = np.isfinite(peaks_U)
    split: dict[str, Any] = {}
    if not kind and any(f"memory/peak_{name}_bytes" in rows for name in COMPONENTS):
        split = {name: np.nan_to_num(column(f"memory/{prefix}peak_{name}_bytes"))[has_U] for name in COMPONENTS}
        # What the allocator has of a phase beyond the ledger; the whole update's is in `other` already.
        split["other"] = split["other"] + peaks_U[has_U] - sum(split.values())
    return Series(
        run.seed,
        rows.index.to_numpy()[has_U],
        peaks_U[has_U],
        (empty if kind else column(f"memory/{prefix}byte_seconds"))[has_U],
        column(f"time/{phase}_seconds")[has_U],
        split,
    )


def record(
    arm: Arm,
    over_time: str,
    phase: str = "update",
    quantity: str = "bytes in use",
    seeds: Sequence[int] | None = None,
    steady: bool = False,
) -> "MemoryRecord":
    """Return one statistic of an arm, over all its seeds that count or those given; NaN where nothing was recorded.

    Args:
        phase: "update" or one of `src.records.PHASES`.
        quantity: "bytes in use", which run.json's memory_includes explains, or CUDA's "reserved bytes".
        steady: leave out the first update of each process, in which lazily made state appears.
    """
    from src.records import Includes, compared_settings, measure

    counted = [run for run in arm.counted if seeds is None or run.seed in seeds]
    about = (counted or arm.runs)[0]
    return measure(
        [series(run, phase, quantity, steady) for run in counted],
        over_time,
        quantity=quantity,
        phase=phase,
        scope=f"process on {about.record.get('device')}",
        includes=Includes(tuple(about.record.get("memory_includes") or ()), (), not steady, not steady),
        hardware=_hardware(counted),
        settings=compared_settings(about.config),
    )


def savings(arm: Arm, baseline: Arm, over_time: str, steady: bool = False) -> "Saving":
    """Return what an arm saves over the baseline in one statistic, over the seeds that count in both.

    Raises:
        NotComparable: with the reason.
    """
    from src.records import NotComparable, saving

    shared = sorted({*arm.seeds} & {*baseline.seeds})
    ours, theirs = (one.unmeasured or record(one, over_time, seeds=shared, steady=steady) for one in (arm, baseline))
    if not (shared or arm.unmeasured or baseline.unmeasured):
        raise NotComparable("not comparable: there is no seed whose updates both have")
    return saving(ours, theirs)


def outcome(arm: Arm) -> str:
    """Return how an arm without a number ended: `out of memory in PHASE (wanted X beside Y, cap Z)`; else empty."""
    from src.records import readable

    if arm.unmeasured is None:
        return ""
    error = next(run for run in arm.runs if run.status == arm.unmeasured.status).record.get("error") or {}
    facts = [
        f"{words} {readable(error[key])}"
        for key, words in (("wanted_bytes", "wanted"), ("live_bytes", "beside"))
        if error.get(key) is not None
    ]
    known = [" ".join(facts)] if facts else []
    if error.get("cap_bytes") is not None:
        known.append(f"cap {readable(error['cap_bytes'])}")
    known = known or [str(error.get("type"))]
    return f"{arm.unmeasured.status.replace('_', ' ')} in {arm.unmeasured.phase} ({', '.join(known)})"


def choose_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """Return the arm of that name; without a name the dense one, None where there is none or several.

    Raises:
        RunsError: no arm has the name.
    """
    from analysis.runs import RunsError

    if name is None:
        dense = [arm for arm in arms if re.split("[- ]", arm.name)[0] == "baseline"]
        return dense[0] if len(dense) == 1 else next((arm for arm in dense if arm.name == "baseline"), None)
    for arm in arms:
        if arm.name == name:
            return arm
    raise RunsError(f"no arm {name} to compare with: there is {', '.join(arm.name for arm in arms)}")


def _load(run: dict[str, Any]) -> Run:
    import pandas as pd
    import yaml

    from analysis.runs import read_rows

    folder = Path(run["folder"])
    metrics, memory, evals = (read_rows(folder / f"{name}.jsonl") for name in ("metrics", "memory", "evals"))
    seconds = {row["update"]: {k: v for k, v in row.items() if k.startswith("time/")} for row in metrics}
    rows = pd.DataFrame([seconds.get(row["update"], {}) | row for row in memory] or metrics)
    rows = rows.set_index("update") if len(rows) else rows
    if "memory/peak_bytes" in rows:  # of an update that was not measured nothing counts
        measured = "memory/byte_seconds" if "memory/byte_seconds" in rows else "memory/peak_bytes"
        rows = rows[rows[measured].notna()]
    else:
        rows = rows.iloc[:0]
    try:
        config = yaml.safe_load((folder / "config.yaml").read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        config = {}
    return Run(
        run["id"],
        run["name"],
        run["seed"],
        run["status"],
        json.loads((folder / "run.json").read_bytes()),
        config if isinstance(config, dict) else {},
        rows,
        max((row.get("memory/evaluation_peak_bytes") or 0 for row in evals), default=0) or math.nan,
        warm_ups(folder),
    )


def _unmeasured(run: Run) -> "Unmeasured":
    from src.records import Unmeasured

    error = run.record.get("error") or {}
    phase = error.get("phase") or run.record.get("phase")
    return Unmeasured(run.status, phase, error.get("wanted_bytes"), error.get("cap_bytes"), error.get("type"))


def _hardware(runs: Sequence[Run]) -> dict[str, str]:
    """Return the hardware of runs; where it is not one, all of it."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        facts = dict(run.record.get("hardware") or {})
        if later := [str(change) for change in run.record.get("mixed") or [] if str(change).startswith("hardware")]:
            facts["changed later"] = "; ".join(later)
        for key, value in facts.items():
            found.setdefault(key, {})[str(value)] = None
    return {key: " | ".join(values) for key, values in found.items()}
