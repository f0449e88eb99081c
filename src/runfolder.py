"""The files of a run folder: whole after a kill at any instant, and readable whatever was done to them.

docs/design.md, section 5, has the contract. Rows have one line each; a line that a kill left torn is no row.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROW_FILES = ("metrics.jsonl", "memory.jsonl", "evals.jsonl", "events.jsonl", "samples.jsonl")
# What a field of run.json is, where somebody may have edited it.
_FITS: dict[str, Callable[[Any], bool]] = {
    "status": lambda value: isinstance(value, str),
    "start": lambda value: _is_number(value),
    "heartbeat": lambda value: _is_number(value),
    "updates_done": lambda value: type(value) is int and value >= 0,
    "checkpoint": lambda value: isinstance(value, dict) and type(value.get("update")) is int,
    "warm_start": lambda value: isinstance(value, dict) and isinstance(value.get("hash"), str),
    "process": lambda value: (
        isinstance(value, dict)
        and type(value.get("pid")) is int
        and 0 < value["pid"] < 2**31
        and isinstance(value.get("host"), str)
    ),
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # also bounds what has no float


def read_record(folder: Path) -> dict[str, Any] | None:
    """The run.json of a folder; None where no run was started, an empty record where the file is damaged.

    A field that others rely on and that is not what it should be is left out.
    """
    try:
        record = json.loads((folder / "run.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IsADirectoryError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {key: value for key, value in record.items() if value is None or key not in _FITS or _FITS[key](value)}


def failure(record: Mapping[str, Any]) -> str:
    """What a record says of a failure: phase, type of the error, first line of its message."""
    error = record.get("error")
    if not isinstance(error, Mapping):
        error = {}
    parts = error.get("type"), *str(error.get("message") or "").splitlines()[:1]
    phase = error.get("phase") or record.get("phase")
    return ": ".join([f"in {phase}", *(str(part) for part in parts if part)])


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in its order; what is no row is left out, and a file that is not there has none.

    Raises:
        OSError: the file cannot be read, or is none.
    """
    return [row for line in _lines(path) if (row := _row(line)) is not None]


def cut_back(folder: Path, update: int) -> None:
    """Drop the rows after `update` (all with -1), and lines that a kill left torn; each file is replaced atomically.

    Samples go with their evaluation, whose row is written after them. Events stay: they tell what happened.
    """
    limits: dict[str, float] = {"events.jsonl": math.inf}
    for name in ROW_FILES:
        lines = _lines(folder / name)
        updates = {line: row["update"] for line in lines if (row := _row(line)) is not None}
        kept = [line for line in lines if line in updates and updates[line] <= limits.get(name, update)]
        if name == "evals.jsonl":
            limits["samples.jsonl"] = max((updates[line] for line in kept), default=-1)
        if kept != lines:
            write_atomically(folder / name, b"".join(kept))


def _lines(path: Path) -> list[bytes]:
    """The lines of a file with their ends.

    Raises:
        OSError: the path is a folder or a device, which may have no end; whoever put it there may have moved the rows.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise OSError(errno.EINVAL, "a folder or a device is where the file of rows should be", str(path))
    return path.read_bytes().splitlines(keepends=True)


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None where it is torn, or no object with a whole number `update`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the latter: thousands of open brackets
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and type(row.get("update")) is int
    return row if whole else None


def place(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from any other that exists; None where there is none.

    File systems give the number of a removed one to the next: who compares keeps the folder open meanwhile.
    """
    try:
        about = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_dev, about.st_ino


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row with one write, so that a kill tears at most the last line.

    A full disk takes a part of it: that is taken back, so that no later row is glued to it.
    """
    line = to_json(row) + b"\n"
    with _naming(path), open(path, "ab", buffering=0) as file:
        written = file.write(line)
        if written != len(line):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def to_json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(_null_for_non_finite(value), allow_nan=False, indent=indent).encode()


def _null_for_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _null_for_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_null_for_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a kill at any instant, sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _naming(path):
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:  # a stop included
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path into an error of the system that names none, as those of writing do."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
