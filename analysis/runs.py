"""Run folders -> tidy frames. Reads what docs/design.md, section 5, promises, and nothing else.

    runs = load_runs("outputs")           # one row a run
    evals = load_evals(runs)              # one row an evaluation of a run
    metrics = load_metrics(runs)          # one row an update of a run

Select runs first (`runs[runs["study"] == "main"]`); the other two read only the runs they are given.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

SCHEMA_VERSION = 1
STALE_SECONDS = 60.0
"""A run that calls itself running, but was not heard of for this long, was killed."""

RUN_COLUMNS = ["study", "label", "variant", "name", "seed", "status"]
"""The columns which the rows of evaluations and metrics share with their run, after its `id`."""

_REQUIRED = {"id": str, "study": str, "label": str, "variant": str, "seed": int, "status": str}
_OPTIONAL = {
    "phase": str,
    "error": dict,
    "updates": int,
    "updates_done": int,
    "start": int | float,
    "end": int | float,
    "heartbeat": int | float,
    "threads": int,
    "device": str,
    "task": dict,
    "warm_start": dict,
    "hardware": dict,
    "mixed": list,
    "memory_includes": list,
    "parameters": int,
}
_BYTES_OF_A_FAILURE = ("wanted_bytes", "cap_bytes", "live_bytes")


class RunsError(Exception):
    """Nothing can be read or drawn; the message is one sentence for the user."""


def find_runs(root: str | Path) -> list[Path]:
    """Every folder at or below `root` that holds a run.json, sorted.

    Hidden folders, `wandb` folders and the insides of a run folder are not searched.
    """
    found = []
    for folder, children, files in os.walk(root):
        if "run.json" in files:
            found.append(Path(folder))
            children.clear()
        children[:] = [child for child in children if child != "wandb" and not child.startswith(".")]
    return sorted(found)


def load_runs(root: str | Path, now: float | None = None) -> pd.DataFrame:
    """One row a run below `root`, ordered by study, name (numbers by value) and seed.

    Columns: id, study, label, variant (hash), name (the label; with the hash where two variants of the study
    share the label), seed, status, phase, error (its type), updates (planned), updates_done, start, end,
    heartbeat (unix seconds), threads, device, task, task_version, warm_start (hash), warm_start_accuracy,
    folder. A status `running` whose heartbeat is older than `STALE_SECONDS` at `now` is given as `killed`.

    A run.json that cannot be used costs a warning line on stderr, not the others.

    Raises:
        RunsError: `root` is no folder, or no run below it can be read.
    """
    if not Path(root).is_dir():
        raise RunsError(f"{root} is not a folder: give the root of your runs, e.g. outputs")
    folders = find_runs(root)
    if not folders:
        raise RunsError(
            f"no run below {root}: make some with `python -m src.train +ablation=decay seed=0,1,2 -m`, "
            "or give the folder that holds yours"
        )
    now = time.time() if now is None else now
    rows = []
    for folder in folders:
        try:
            rows.append(_read_run(folder, now))
        except RunsError as reason:
            _warn(f"skipped a run: {reason}")
    if not rows:
        raise RunsError(f"none of the {len(folders)} runs below {root} can be read (reasons above)")
    runs = _newest_of_each_seed(pd.DataFrame(rows))
    shared = runs.groupby(["study", "label"])["variant"].transform("nunique") > 1
    runs["name"] = runs["label"].where(~shared, runs["label"] + " [" + runs["variant"] + "]")
    order = sorted(
        runs.index,
        key=lambda i: (runs.at[i, "study"], _by_value(runs.at[i, "name"]), runs.at[i, "seed"]),
    )
    first = ["id", *RUN_COLUMNS]
    return runs.loc[order, [*first, *(c for c in runs.columns if c not in first)]].reset_index(drop=True)


def studies(root: str | Path, study: str | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (study, its runs) below `root`, all of them or the one asked for.

    Raises:
        RunsError: nothing can be read there, or there is no such study.
    """
    runs = load_runs(root)
    if study is not None and study not in set(runs["study"]):
        raise RunsError(f"no study {study} below {root}: there is {', '.join(runs['study'].unique())}")
    for name, part in runs.groupby("study"):
        if study in (None, name):
            yield str(name), part


def load_evals(runs: pd.DataFrame) -> pd.DataFrame:
    """Every evaluation of `runs`: id, study, label, variant, name, seed, status, update, then the keys."""
    return _load(runs, "evals.jsonl")


def load_metrics(runs: pd.DataFrame) -> pd.DataFrame:
    """Every update of `runs`: id, study, label, variant, name, seed, status, update, then the keys."""
    return _load(runs, "metrics.jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file in order of `update`; of two rows of one update the later one counts.

    A last line that a kill cut short is ignored in silence; any other line that is no row costs a warning on
    stderr, and so does a row in which bytes or seconds are no numbers, or negative. A file that does not exist (yet)
    has no rows.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    by_update: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            by_update[_update_of(row)] = row
        except ValueError:
            if number < len(lines):  # what follows the last newline may be torn
                _warn(f"skipped line {number} of {path}: not a JSON object with a whole number `update`")
        else:
            if damaged := next((key for key, value in row.items() if not _possible(key, value)), None):
                _warn(f"skipped line {number} of {path}: its {damaged} is {row[damaged]!r}")
                del by_update[row["update"]]
    return [by_update[update] for update in sorted(by_update)]


def _possible(key: str, value: Any) -> bool:
    """Tell whether bytes and seconds are what they may be; of the ledger's gap to CUDA's allocator any number."""
    if value is None or not key.endswith(("_bytes", "_seconds")):
        return True
    return isinstance(value, int | float) and not (value < 0 and key != "memory/ledger_gap_bytes")


def _update_of(row: Any) -> int:
    update = row.get("update") if isinstance(row, dict) else None
    if not isinstance(update, int) or isinstance(update, bool):
        raise ValueError("not a row")
    return update


def _load(runs: pd.DataFrame, file: str) -> pd.DataFrame:
    def rows() -> Iterator[dict[str, Any]]:
        for run in runs.to_dict("records"):
            about = {column: run[column] for column in ["id", *RUN_COLUMNS]}
            for row in read_rows(Path(run["folder"]) / file):
                yield about | row

    frame = pd.DataFrame(list(rows()))
    return frame if len(frame) else pd.DataFrame(columns=["id", *RUN_COLUMNS, "update"])


def _read_run(folder: Path, now: float) -> dict[str, Any]:
    """The row of one run; raises RunsError with the reason where there is none."""
    path = folder / "run.json"
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunsError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(record, dict):
        raise RunsError(f"{path} holds a {type(record).__name__}, not an object")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise RunsError(
            f"{path} has schema_version {record.get('schema_version')!r}, and this version of the project "
            f"reads {SCHEMA_VERSION}: read it with the version that wrote it"
        )
    for key, kind in (_REQUIRED | _OPTIONAL).items():
        value = record.get(key)
        if not (isinstance(value, kind) or (value is None and key in _OPTIONAL)):
            raise RunsError(f"{path} is damaged: its {key} is {value!r}")
    failed = record.get("error") or {}
    sizes = [failed.get(key) for key in _BYTES_OF_A_FAILURE]
    parts = failed.get("components") or {}
    if not isinstance(parts, dict) or not all(isinstance(size, int | None) for size in (*sizes, *parts.values())):
        raise RunsError(f"{path} is damaged: its error is {failed!r}")
    last_sign = record.get("heartbeat") or record.get("start") or 0.0
    killed = record["status"] == "running" and now - last_sign > STALE_SECONDS
    failure, task, warm_start = (record.get(key) or {} for key in ("error", "task", "warm_start"))
    plain = {key: record.get(key) for key in _REQUIRED | _OPTIONAL}
    return plain | {
        "status": "killed" if killed else record["status"],
        "error": failure.get("type"),
        "task": task.get("name"),
        "task_version": task.get("version"),
        "warm_start": warm_start.get("hash"),
        "warm_start_accuracy": warm_start.get("accuracy"),
        "folder": str(folder),
    }


def _newest_of_each_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Copies of a run (a root that holds two roots) must not count as two seeds."""
    newest = runs.sort_values("start", kind="stable", na_position="first").drop_duplicates(
        ["study", "variant", "seed"], keep="last"
    )
    for folder in runs.loc[runs.index.difference(newest.index), "folder"]:
        _warn(f"skipped a run: {folder} is older than another run of the same study, variant and seed")
    return newest.sort_index()


def _by_value(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts rank=4 before rank=16."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
