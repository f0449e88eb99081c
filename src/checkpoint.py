"""Checkpoints: what a run needs to go on, in files that a kill cannot tear and that cannot run code.

FOLDER/update-000050-0123456789abcdef.pt is a `torch.save` of tensors and plain values. The last part of its name is the
head of its content's SHA-256: a file is written under another name, synced to the disk, and gets its own name last.
"""

import hashlib
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor
from torch.nn import Parameter

from src.runfolder import sync

FORMAT = 1
_NAME = re.compile(r"update-([0-9]{6}|[1-9][0-9]{6,})-([0-9a-f]{16})\.pt")
_TEMPORARY = ".checkpoint.tmp"
_PLAIN = (NoneType, bool, int, float, str)
# What a run goes on from, and the types each may have.
_FIELDS: dict[str, tuple[type, ...]] = {
    "update": (int,),
    "weights": (dict,),
    "method": (dict,),
    "batch": (dict, NoneType),
    "wandb_id": (str, NoneType),
}


class CheckpointError(ValueError):
    """A file that cannot be resumed from; the message is the reason."""


def save(folder: Path, run_id: str, state: Mapping[str, Any]) -> Path:
    """Write the state after `state["update"]` and return the file; only views of a part of their storage are copied.

    Args:
        state: the fields of `load`, made of tensors, on any device, and plain values, in dicts, lists and tuples.

    Raises:
        TypeError: a value that a safe loader would refuse; the message has its place.
        OSError: the disk is full or refuses; no file is left.
    """
    content = {"format": FORMAT, "run": run_id} | _lean(state)
    if name := _wrong_field(content):
        kind = type(state.get(name)).__name__
        raise TypeError(f"the state[{name!r}] is missing or a {kind}, from which no run can go on")
    temporary = folder / _TEMPORARY
    try:
        folder.mkdir(exist_ok=True)
        temporary.unlink(missing_ok=True)  # what a kill left; a link there is not followed
        with open(temporary, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"update-{state['update']:06d}-{_digest(temporary)}.pt"
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch wraps what its writing raises
        if not isinstance(cause, OSError):
            raise
        raise OSError(
            cause.errno,
            f"the checkpoint after update {state['update']} cannot be written to {folder} ({cause.strerror}): make "
            "room or give access there, or type checkpoint.keep=0 to run without checkpoints",
        ) from error
    sync(folder)
    return path


def found(folder: Path) -> list[tuple[int, Path]]:
    """Return (update, file) of the checkpoints in a folder, the newest first, by name alone."""
    if not folder.is_dir():
        return []
    names = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in names), reverse=True)


def load(path: Path, run_id: str) -> dict[str, Any]:
    """Return a checkpoint's state. Its tensors lie on the CPU and are read from the file as they are used.

    Fields: update, weights, method, batch (None between batches), wandb_id.

    Raises:
        CheckpointError: no checkpoint's name, a link, a file that is gone or cannot be read, a content that its name
            does not vouch for, a pickle that would run code, another run's file, a field that is not there.
    """
    try:
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_file():
            raise CheckpointError("it is no checkpoint's file")
        if _digest(path) != match[2]:
            raise CheckpointError("its content is not what its name vouches for")
        with ZipFile(path) as archive:  # nothing is ever extracted, but such a file is none of ours
            if any(name.startswith("/") or ".." in name.split("/") for name in archive.namelist()):
                raise CheckpointError("a name in it leads out of it")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError("its content is of another format")
        if content.get("run") != run_id or content.get("update") != int(match[1]):
            raise CheckpointError("it is another run's or another update's")
        if name := _wrong_field(content):
            raise CheckpointError(f"its {name} is missing or of a wrong type")
    except CheckpointError:
        raise
    except Exception as error:  # unpickling what somebody else wrote can raise anything
        raise CheckpointError(f"it cannot be loaded safely ({type(error).__name__})") from error
    return content


def refuse(path: Path) -> None:
    """Give a file that cannot be resumed from a name that is no checkpoint's; it is kept for whoever wonders."""
    with suppress(OSError):  # it is gone, or stays and is refused again
        path.rename(path.with_name(f"{path.name}.refused"))


def prune(
    folder: Path, keep: int, accuracies: Mapping[int, float], due: Callable[[int], bool] = lambda update: True
) -> None:
    """Remove all but the latest `keep` checkpoints and the one whose update has the best held-out accuracy.

    Of equally good ones the earliest counts. One of a stop, at an update that is not `due`, stays while it is the
    newest and takes no other's place: a run that was stopped ends with the files of one that was not.
    """
    files = found(folder)
    kept = {update for update, _ in [file for file in files if due(file[0])][:keep]}
    kept |= {update for update, _ in files[: min(keep, 1)]}
    best = best_update(folder, accuracies)
    for update, path in files:
        if update not in kept and update != best:
            _remove(path)


def best_update(folder: Path, accuracies: Mapping[int, float]) -> int | None:
    """Return the update with the best held-out accuracy among those that have a checkpoint; the earliest of equals."""
    updates = sorted(update for update, _ in found(folder) if update in accuracies)
    return max(updates, key=lambda update: accuracies[update], default=None)


def clear(folder: Path) -> None:
    """Remove every checkpoint, and what a kill left of the writing of one."""
    for _, path in found(folder):
        _remove(path)
    _remove(folder / _TEMPORARY)


def own(tree: Any, device: torch.device) -> Any:
    """Return a copy whose tensors have memory of their own on a device."""
    return _map(tree, lambda tensor: tensor.to(device, copy=True))


def restore_method(method: Any, state: dict[str, Any]) -> None:
    """Load a method's state; its tensors keep the dtypes they were saved with.

    `torch.optim.Optimizer.load_state_dict` casts them to the parameters', which loses float32 moments of bfloat16
    weights. A method that is no such optimizer has its own way.
    """
    method.load_state_dict(state)
    if not isinstance(method, torch.optim.Optimizer) or not {"state", "param_groups"} <= state.keys():
        return
    for group, saved in zip(method.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if index in state["state"]:
                method.state[parameter].update(state["state"][index])


def _wrong_field(content: Mapping[str, Any]) -> str | None:
    return next((n for n, types in _FIELDS.items() if n not in content or type(content[n]) not in types), None)


def _lean(state: Mapping[str, Any]) -> Any:
    """Return the state with nothing behind its tensors: no graph, no attributes, no storage that it has only a part of.

    torch.save writes whole storages. One that the state fills, even with several views, is neither copied nor unshared.
    """
    tensors: list[Tensor] = []
    _map(dict(state), tensors.append)
    used: Counter[int] = Counter()
    for tensor in tensors:
        used[tensor.untyped_storage().data_ptr()] += tensor.nbytes

    def lean(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        return tensor.detach().clone() if used[storage.data_ptr()] < storage.nbytes() else tensor.detach()

    return _map(dict(state), lean)


def _map(tree: Any, change: Callable[[Tensor], Any], place: str = "") -> Any:
    """Return a tree of dicts, lists, tuples and plain values, its tensors changed.

    Raises:
        TypeError: anything else in it, which a safe loader would refuse.
    """
    if type(tree) in (dict, OrderedDict):
        odd_keys = [key for key in tree if type(key) not in _PLAIN]
        if not odd_keys:
            return {key: _map(value, change, f"{place}[{key!r}]") for key, value in tree.items()}
        place, tree = f"{place}'s key {odd_keys[0]!r}", odd_keys[0]
    elif type(tree) in (list, tuple):
        return type(tree)(_map(value, change, f"{place}[{index}]") for index, value in enumerate(tree))
    # Another subclass of Tensor runs code when it is loaded; sparse and meta tensors have no storage to write.
    elif type(tree) in (Tensor, Parameter) and tree.layout is torch.strided and not tree.is_meta:
        return change(tree)
    elif type(tree) in _PLAIN:
        return tree
    kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
    if type(tree) is Tensor:
        kind = f"{tree.layout} {tree.device} tensor"
    raise TypeError(
        f"the state{place} is a {kind}, which a checkpoint cannot hold: a method's state_dict() is made of tensors and "
        "plain values (bool, int, float, str, None) in dicts, lists and tuples"
    )


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
