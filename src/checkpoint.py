"""Checkpoints: what a run needs to go on, in files that a kill cannot tear and that cannot run code.

FOLDER/update-000050-0123456789abcdef.pt is a `torch.save` of tensors and plain values. The last part of its name is the
head of its content's SHA-256: a file is written under another name, synced to the disk, and gets its own name last.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
_NAME = re.compile(r"update-(\d{6,})-([0-9a-f]{16})\.pt")
_TEMPORARY = ".checkpoint.tmp"


class CheckpointError(ValueError):
    """A file that cannot be resumed from; the message is the reason."""


def save(folder: Path, run_id: str, state: Mapping[str, Any]) -> Path:
    """Write the state after `state["update"]` and return the file; nothing is copied in memory.

    Args:
        state: tensors, on any device, and plain values, in dicts, lists and tuples.

    Raises:
        TypeError: a value that a safe loader would refuse; the message has its place.
        OSError: the disk is full or refuses; no file is left.
    """
    _check_plain(state, "")
    folder.mkdir(exist_ok=True)
    temporary = folder / _TEMPORARY
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "run": run_id, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"update-{state['update']:06d}-{_digest(temporary)}.pt"
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):  # torch's own wrapping
            raise error.__context__ from None
        raise
    _sync_folder(folder)
    return path


def found(folder: Path) -> list[tuple[int, Path]]:
    """Return (update, file) of the checkpoints in a folder, the newest first, by name alone."""
    if not folder.is_dir():
        return []
    names = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in names), reverse=True)


def load(path: Path, run_id: str) -> dict[str, Any]:
    """Return a checkpoint's state. Its tensors lie on the CPU and are read from the file as they are used.

    Raises:
        CheckpointError: no checkpoint's name, a link, a content that its name does not vouch for, a pickle that would
            run code, another run's file.
    """
    match = _NAME.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_file():
        raise CheckpointError("it is no checkpoint's file")
    try:
        if _digest(path) != match[2]:
            raise CheckpointError("its content is not what its name vouches for")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # unpickling what somebody else wrote can raise anything
        raise CheckpointError(f"it cannot be loaded safely ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError("its content is of another format")
    if content.get("run") != run_id or content.get("update") != int(match[1]):
        raise CheckpointError("it is another run's or another update's")
    return content


def refuse(path: Path) -> None:
    """Give a file that cannot be resumed from a name that is no checkpoint's; it is kept for whoever wonders."""
    path.rename(path.with_name(f"{path.name}.refused"))


def prune(folder: Path, keep: int, accuracies: Mapping[int, float]) -> None:
    """Remove all but the latest `keep` checkpoints and the one whose update has the best held-out accuracy.

    Of equally good ones the earliest counts, so that a repeated run keeps the same.
    """
    files = found(folder)
    kept = {update for update, _ in files[:keep]}
    best = best_update(folder, accuracies)
    for update, path in files:
        if update not in kept and update != best:
            path.unlink()


def best_update(folder: Path, accuracies: Mapping[int, float]) -> int | None:
    """Return the update with the best held-out accuracy among those that have a checkpoint; the earliest of equals."""
    updates = sorted(update for update, _ in found(folder) if update in accuracies)
    return max(updates, key=lambda update: accuracies[update], default=None)


def clear(folder: Path) -> None:
    """Remove every checkpoint, and what a kill left of the writing of one."""
    for _, path in found(folder):
        path.unlink()
    (folder / _TEMPORARY).unlink(missing_ok=True)


def own(tree: Any, device: torch.device) -> Any:
    """Return a copy whose tensors have memory of their own on a device."""
    match tree:
        case Tensor():
            return tree.to(device, copy=True)
        case dict():
            return {key: own(value, device) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(own(value, device) for value in tree)
    return tree


def restore_method(method: Any, state: dict[str, Any]) -> None:
    """Load a method's state; its tensors keep the dtypes they were saved with.

    `torch.optim.Optimizer.load_state_dict` casts them to the parameters', which loses float32 moments of bfloat16
    weights.
    """
    method.load_state_dict(state)
    for group, saved in zip(method.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor) and method.state[parameter][key].dtype != value.dtype:
                    method.state[parameter][key] = value


def _check_plain(tree: Any, place: str) -> None:
    for where, value in _leaves(tree, place):
        if not (value is None or type(value) in (bool, int, float, str) or type(value) is Tensor):
            raise TypeError(
                f"the state{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
                "hold: a method's state_dict() is made of tensors and plain values."
            )


def _leaves(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    if type(tree) in (dict, list, tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{place}[{key!r}]")
    else:
        yield place, tree


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
