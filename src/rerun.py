"""Repeating a run from its folder (`rerun_from=RUN`), and comparing the two. Standard library and yaml only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from src.config import ConfigError
from src.identity import BOOKKEEPING
from src.runfolder import rows

_COMPARED = ("evals.jsonl", "metrics.jsonl", "memory.jsonl", "samples.jsonl")
_GROUPS = ("model", "task", "method", "control")


def read_config(folder: Path, conf: Path) -> dict[str, Any]:
    """Return the configuration of a run's folder.

    Raises:
        ConfigError: the folder holds none that can be read, or one of a model, task, method or control that is not in
            `conf`.
    """
    try:
        values: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
        unknown = [group for group in _GROUPS if not (conf / group / f"{values[group]['name']}.yaml").is_file()]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"rerun_from={folder} is no run's folder: its config.yaml cannot be read ({type(error).__name__}). Type "
            "rerun_from=ROOT/STUDY/LABEL-sSEED-HASH."
        ) from None
    if unknown:
        group = unknown[0]
        raise ConfigError(
            f"rerun_from={folder}: its config.yaml has {group}.name={values[group]['name']}, which this version does "
            "not have. Repeat it with the version that made it; run.json names the commit."
        )
    return values


def check_place(original: Path, repeat: Path) -> None:
    """Refuse to repeat a run in its own folder, where there would be nothing left to compare with.

    Raises:
        ConfigError: in one sentence.
    """
    if original.resolve() == repeat.resolve():
        raise ConfigError(
            f"rerun_from={original} would repeat the run in its own folder and lose what it is compared with. Type "
            "study=NAME or root=FOLDER beside it; or rerun=true with its own command, to do without the comparison."
        )


def merge(
    original: Mapping[str, Any], defaults: Mapping[str, Any], line: Mapping[str, Any], typed_keys: set[str]
) -> dict[str, Any]:
    """Return the configuration that repeats a run: all that its numbers depend on is the original's.

    Args:
        original: the run's configuration.
        defaults: today's for the same model, task, method and control: keys that the original is too old to have.
        line: this command's, for the bookkeeping; what shows in rows or in their last bits is the original's unless
            among `typed_keys`.
    """
    values = dict(defaults)
    for key, value in original.items():
        known = defaults.get(key)
        values[key] = {**known, **value} if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    kept_keys = {"threads", "device", "samples_logged"} - typed_keys
    values |= {key: line[key] for key in BOOKKEEPING if key not in kept_keys}
    values["study"] = line["study"] or "rerun"
    folder = Path(line["rerun_from"])
    for group in _GROUPS:
        file, _, name = str(values[group].get("source", "")).partition(":")
        kept = folder / "sources" / group / Path(file).name
        if name and kept.is_file():  # as it was then, wherever the original is now
            values[group] = {**values[group], "source": f"{kept}:{name}"}
    return values


def first_difference(original: Path, repeat: Path, whole: bool) -> str | None:
    """Return in words where the rows of two run folders first differ, what the clock says apart; None if nowhere.

    Args:
        whole: the original is finished; else only as many rows are compared as it has.
    """
    for name in _COMPARED:
        before, now = rows(original / name), rows(repeat / name)
        for row, other in zip(before, now, strict=False):
            for key in (*row, *other):
                if row.get(key) != other.get(key) and not _tells_time(key):
                    return f"{name}, update {row.get('update')}: {key} is {other.get(key)} instead of {row.get(key)}"
        if len(before) != len(now) and (whole or len(before) > len(now)):
            return f"{name} has {len(now)} rows instead of {len(before)}"
    return None


def _tells_time(key: str) -> bool:
    """Tell whether a row's value is a reading of the clock."""
    return key.startswith("time/") or key.endswith("byte_seconds")
