"""The cells of a multirun: what became of each run, and how long the rest will take, from the run folders alone."""

import json
import math
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from src.config import Config
from src.identity import BOOKKEEPING, Identity, leaves
from src.runfolder import failure, read_record

STATES = ("finished", "running", "failed", "out_of_memory", "left")
STALE_SECONDS = 60.0  # a run that calls itself running and gave no sign for longer was killed
_OWN_ROWS = 3  # updates after which a run tells more of itself than others do
_ALL_LISTED = 40  # cells; of more than that the finished ones are only counted
_SAME = {"model", "task", "device"}  # runs that differ in these say nothing of each other's time and memory
_IGNORED = set(BOOKKEEPING) - _SAME
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times as fast where libyaml is there
_Leaves = frozenset[tuple[str, str]]  # (dotted key, value as text) of a configuration


@dataclass(frozen=True)
class Cell:
    """One run of a multirun. Unless `basis` is empty, `seconds` (still to do) and `peak_bytes` are estimates."""

    identity: Identity
    seed: int
    updates: int  # planned
    state: str  # one of STATES
    done: int  # updates done
    reason: str  # why it failed, how it was cut off, who is at it
    seconds: float | None  # of training, evaluations included
    peak_bytes: int | None  # largest of its updates
    basis: str  # what the numbers are estimated from; "" where they are measured


def survey(jobs: Sequence[tuple[Config, Identity]], now: float | None = None, *, planned: bool = False) -> list[Cell]:
    """Return the cell of each job, in order; `now` (unix seconds) judges heartbeats.

    With `planned`, what a command would do: runs that it would repeat or try again are left.

    What is still to do is estimated from a run's own updates where it has some, else from the finished runs below its
    root, of the same model, task and device, that differ from it in the fewest keys.
    """
    now = time.time() if now is None else now
    rows_of, finished_below = cache(_rows), cache(_finished_runs)
    cells = []
    for config, identity in jobs:
        record = _record(identity.folder)
        state, reason = _state(record, now)
        done = record.get("updates_done") or 0
        again = (config.rerun and record) or (config.retry_failed and state in ("failed", "out_of_memory"))
        if planned and again and state in ("finished", "failed", "out_of_memory"):
            state, reason = "left", state
        if state == "left":  # it goes on from its checkpoint
            from_start = planned and (config.rerun or config.resume == "never")
            done = 0 if from_start else min(done, (record.get("checkpoint") or {}).get("update") or 0)
        rows = rows_of(identity.folder)
        seconds, peak, basis = rows.seconds, rows.peak, ""
        if state in ("left", "running"):
            seconds, peak, basis = _estimate(config, done, rows, finished_below(Path(config.root)), rows_of)
        cells.append(Cell(identity, config.seed, config.updates, state, done, reason, seconds, peak, basis))
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Return the cells as lines for a terminal: a row each, the counts, and what is left to do."""
    roots = sorted({_root(cell) for cell in cells})
    counts = Counter(cell.state for cell in cells)
    listed = [cell for cell in cells if len(cells) <= _ALL_LISTED or cell.state != "finished"]
    lines = _aligned(listed, len(roots) == 1) if listed else []
    if len(listed) < len(cells):
        lines.append(f"{_runs(counts['finished'], 'finished ')} not listed, for there are more than {_ALL_LISTED}")
    if any(cell.basis for cell in listed):
        lines.append("~ is an estimate: of time, what is still to do")
    states = ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in STATES)
    lines.append(f"{_runs(len(cells))} in {', '.join(map(str, roots))}: {states}")
    if left := [cell for cell in cells if cell.state in ("left", "running")]:
        lines.append(f"to do: {_still_to_do(left)}")
    if counts["failed"] + counts["out_of_memory"]:
        lines.append("retry_failed=true takes up failed and out-of-memory runs")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Rows:
    """What the rows of a run say: seconds of each update and of each evaluation, largest peak in bytes."""

    updates: list[float]
    evaluations: list[float]
    peak: int | None

    @property
    def seconds(self) -> float | None:
        return sum(self.updates) + sum(self.evaluations) if self.updates or self.evaluations else None


def _record(folder: Path) -> dict[str, Any]:
    try:
        return read_record(folder) or {}
    except OSError:
        return {}


def _state(record: Mapping[str, Any], now: float) -> tuple[str, str]:
    """Return (state, reason) of a run by its record, which is empty where there is none or it is damaged."""
    match record.get("status"):
        case "finished":
            return "finished", ""
        case "failed" | "out_of_memory" as state:
            return state, failure(record)
        case "interrupted":
            return "left", "interrupted"
        case "running":
            sign = _sign_of_life(record.get("process") or {}, now - (record.get("heartbeat") or 0))
            return ("running", f"in {record.get('phase')}, {sign}") if sign else ("left", "killed")
    return "left", ""


def _sign_of_life(process: Mapping[str, Any], age: float) -> str:
    """Return who is at a run whose heartbeat is `age` seconds old; empty where it was killed."""
    if age > STALE_SECONDS:  # below zero where the clock of another host is ahead
        return ""
    if process.get("host") == socket.gethostname():
        try:
            os.kill(process["pid"], 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass  # it lives and is another user's
    who = f"pid {process['pid']} on {process['host']}, " if process else ""
    return f"{who}heartbeat {max(age, 0):.0f} s ago"


def _rows(folder: Path) -> _Rows:
    metrics, evals = _numbers(folder / "metrics.jsonl"), _numbers(folder / "evals.jsonl")
    peaks = metrics["memory/peak_bytes"]
    return _Rows(metrics["time/update_seconds"], evals["time/evaluation_seconds"], int(max(peaks)) if peaks else None)


def _numbers(path: Path) -> dict[str, list[float]]:
    """Return the numbers of each key of a row file; a missing file, a torn line, nulls are passed over."""
    found: dict[str, list[float]] = defaultdict(list)
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, AttributeError):
                for key, value in json.loads(line).items():
                    if isinstance(value, int | float):
                        found[key].append(value)
    return found


def _finished_runs(root: Path) -> list[tuple[Path, _Leaves]]:
    """Return (folder, leaves of the configuration) of the finished runs below a root; unreadable ones are left out."""
    found = []
    for path in root.glob("[!.]*/[!.]*/config.yaml"):
        if _record(path.parent).get("status") == "finished":
            with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
                found.append((path.parent, _leaves(yaml.load(path.read_bytes(), _LOADER))))
    return found


def _leaves(tree: Mapping[str, Any]) -> _Leaves:
    """Return (dotted key, value as text) of what may matter for time and memory."""
    kept = {key: value for key, value in tree.items() if key not in _IGNORED}
    return frozenset((key, repr(value)) for key, value in leaves(kept))


def _estimate(
    config: Config, done: int, own: _Rows, finished: list[tuple[Path, _Leaves]], rows_of: Callable[[Path], _Rows]
) -> tuple[float | None, int | None, str]:
    """Return (seconds still to do, peak bytes, what they are from); None and "" where there is nothing to go by."""
    left = config.updates - done
    if len(own.updates) >= _OWN_ROWS:
        # evaluations are at update 0, at the multiples of eval_every and at the end
        evaluations = math.ceil(config.updates / config.eval_every) - done // config.eval_every + (done == 0)
        each = fmean(own.evaluations) if own.evaluations else 0.0
        return median(own.updates) * left + each * evaluations, own.peak, f"its own {len(own.updates)} updates"
    mine = _leaves(asdict(config))
    by_distance = defaultdict(list)
    for folder, other in finished:
        keys = {key for key, _ in mine ^ other}
        if not any(key.partition(".")[0] in _SAME for key in keys):
            by_distance[len(keys - {"seed"}), "seed" in keys].append((folder, keys - {"seed"}))
    for _, near in sorted(by_distance.items()):
        measured = [(rows_of(folder), keys) for folder, keys in near if rows_of(folder).updates]
        if measured:
            pace = median((rows.seconds or 0.0) / len(rows.updates) for rows, _ in measured)
            peaks = [rows.peak for rows, _ in measured if rows.peak is not None]
            peak = own.peak or (int(median(peaks)) if peaks else None)
            return pace * left, peak, _basis(len(measured), set().union(*(keys for _, keys in measured)))
    return None, own.peak, ""


def _basis(count: int, differing: set[str]) -> str:
    """Return what an estimate is from; of a group that has another name its other keys go without saying."""
    named = {key.partition(".")[0] for key in differing if key.endswith(".name")}
    keys = sorted(key for key in differing if key.partition(".")[0] not in named or key.endswith(".name"))
    runs = _runs(count, "finished ")
    return f"{runs} that differ{'s'[: count == 1]} in {', '.join(keys)}" if keys else f"{runs} of this variant"


def _root(cell: Cell) -> Path:
    return cell.identity.folder.parent.parent


def _aligned(cells: list[Cell], relative: bool) -> list[str]:
    """Return a header and a row for each cell; numbers stand on the right of their column."""
    rows = [["state", "updates", "time", "peak", "run", "reason" * any(cell.reason for cell in cells)]]
    for cell in cells:
        mark, folder = "~" * bool(cell.basis), cell.identity.folder
        seconds = "-" if cell.seconds is None else mark + _duration(cell.seconds)
        peak = "-" if cell.peak_bytes is None else mark + _size(cell.peak_bytes)
        run = (folder.relative_to(_root(cell)) if relative else folder).as_posix()
        rows.append([cell.state, f"{cell.done}/{cell.updates}", seconds, peak, run, cell.reason])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[4] = max(
        len(row[4]) for row in rows if row[5] or not rows[0][5]
    )  # a long name without a reason pushes no reason aside
    return [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, "<>>><<", widths, strict=True)).rstrip()
        for row in rows
    ]


def _still_to_do(left: list[Cell]) -> str:
    """Return how long the left cells take, and for how many of them that is not known."""
    known = [cell.seconds for cell in left if cell.seconds is not None]
    if not known:
        return "no finished run of this model, task and device to estimate the time from"
    own = {cell.basis.startswith("its own") for cell in left if cell.basis}
    sources = " and ".join(["finished runs"] * (False in own) + ["own updates"] * (True in own))
    unknown = len(left) - len(known)
    gap = f"; {_runs(unknown)} {'has' if unknown == 1 else 'have'} nothing to go by" if unknown else ""
    time_left = _duration(sum(known))
    return f"about {time_left} of training one after the other, warm starts apart (estimated from {sources}{gap})"


def _runs(count: int, kind: str = "") -> str:
    return f"{count} {kind}run{'s'[: count != 1]}"


def _duration(seconds: float) -> str:
    """Return 0.4 s, 41 s, 3 min 20 s, 27 min, 2 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 600:
        parts = (round(seconds) // 60, "min"), (round(seconds) % 60, "s")
    else:
        minutes = round(seconds / 60)
        parts = (minutes // 60, "h"), (minutes % 60, "min")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def _size(count: int) -> str:
    """Return 56.3 MiB, 1.2 GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes:.1f} MiB" if mebibytes < 1023.95 else f"{mebibytes / 1024:.1f} GiB"
