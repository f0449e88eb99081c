"""The command line before Hydra sees it: ablations, contradictions, unknown keys; values of the doors' own options.

Standard library and yaml only.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from src.config import Config, ConfigError
from src.identity import BOOKKEEPING
from src.typed import known, nearest

_GROUPS = ("model", "task", "method", "control")
_TEXTS = {True: "true", False: "false", None: "null"}
# Keys of files and folders.
_PATHS = ("root", "rerun_from", "model.path", "model.chat_template", "model.source", "task.source", "method.source")


def split(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Return (key, value) of each override, the key without `+`, `++` or `~`; flags are left out."""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not argument.startswith("-"):
            yield key.lstrip("+~"), value


def whole_number(text: str) -> int:
    """Return a number of things, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to 10^9 is wanted, got {text!r}")
    return int(text)


def writable(path: Path) -> None:
    """Make sure that a result's file can be written, before the work that it is for; what it holds stays until then.

    Raises:
        ConfigError: there can be none.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.resolve().unlink()  # work that fails leaves no empty result
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Name another file.") from error


def ablation_names(value: str) -> list[str]:
    """Return the ablations that `+ablation=VALUE` names: one, a sweep `a,b` or a list `[a,b]`."""
    return [name for name in (part.strip() for part in value.strip("[]").split(",")) if name]


def prepare(arguments: list[str], conf: Path) -> tuple[list[str], str | None]:
    """Return (arguments for Hydra, the study's name or None).

    `ablation=NAME` and `++ablation=NAME` become `+ablation=NAME`: the group is not in the defaults list, for the sake
    of its plus sign. `-m` may stand anywhere.

    Raises:
        ConfigError: an unknown ablation or key, an ablation that the same line contradicts or whose axes would be lost,
            a multirun inside a W&B sweep.
    """
    arguments = [re.sub(r"^\+*ablation=", "+ablation=", word) for word in arguments]
    arguments = [_quoted(word) if word.partition("=")[0].lstrip("+") in _PATHS else word for word in arguments]
    arguments = sorted(arguments, key=lambda word: word in ("-m", "--multirun"))  # Hydra takes no override after a flag
    overrides = list(split(arguments))
    values = [value for key, value in overrides if key == "ablation"]
    if len(values) > 1:
        raise ConfigError(f"+ablation is given {len(values)} times. Use +ablation=[{','.join(values)}] to apply both.")
    names = ablation_names(values[0]) if values else []
    files = {name: _read_ablation(conf, name) for name in names}
    if len(names) > 1:
        _check_axes(conf, files, values[0])
    for name, ablation in files.items():
        _check_contradiction(conf, name, ablation, overrides)
    keys = known(Config)
    for key, value in overrides:
        if key.split(".")[0] in ("hydra", "ablation", "arm") or key.startswith("hydra/"):
            continue
        if key not in keys and not any(key.startswith(f"{prefix}.") for prefix in _open_groups(keys)):
            raise ConfigError(f"{key}={value}: {key} is not a key of the configuration.{nearest(key, keys)}")
        if key in _GROUPS:
            _check_group(conf, key, value)
    _check_rerun(overrides)
    multirun = any(word in ("-m", "--multirun") for word in arguments) or any(_axes(file) for file in files.values())
    if multirun and "WANDB_SWEEP_ID" in os.environ:
        raise ConfigError(
            "a multirun inside a W&B sweep would put all its runs under one id. Give the axes to the sweep's "
            "parameters and start single runs."
        )
    return arguments, "+".join(names) or None


def sentence(error: Exception) -> str:
    """Return what Hydra says of a command line, on one line; what users meet often in our words."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if found := re.search(r"Ambiguous value for argument '(.+?)'", text):
        return f"{found[1]} gives several values, which take several runs. Add -m at the end of the line."
    if found := re.search(r"Could not override '((\w+)\..+?)'", text):
        return f"{found[1]} is not a key of the {found[2]} that this line chooses. Choose another, or leave it out."
    if found := re.search(r"Could not append to config. An item is already at '(.+?)'", text):
        return f"+{found[1]} would add a key that is there already. Leave out the plus sign: {found[1]}=VALUE."
    if isinstance(error, OSError) and error.errno is not None:  # Hydra's own of a missing file has no number
        return f"root cannot be written: {text}. Type root=FOLDER you may write to."
    return text


def _quoted(argument: str) -> str:
    """Return `KEY=FOLDER,FOLDER` with the quotes that Hydra needs: folders of runs have equals signs in them.

    What is a folder as a whole is one, commas and all; what is written for Hydra (quotes, functions) stays as it is.
    """
    key, _, value = argument.partition("=")
    if key.lstrip("+") != "rerun_from" and "=" not in value:
        return argument
    if value == "null" or value[:1] in ("'", '"') or re.fullmatch(r"\w+\(.*\)", value):
        return argument
    folders = [value] if Path(value).is_dir() else value.split(",")
    return f"{key}={','.join(_hydra_text(folder) for folder in folders)}"


def _hydra_text(text: str) -> str:
    """Return a text in Hydra's single quotes, before which (and at whose end) a backslash counts."""
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", text)
    return f"'{escaped}{escaped[len(escaped.rstrip(chr(92))) :]}'"


def _check_rerun(overrides: list[tuple[str, str]]) -> None:
    """Refuse to repeat a run and to change it at once."""
    original = dict(overrides).get("rerun_from", "null").strip("'")
    for key, value in overrides:
        if original != "null" and key.split(".")[0] not in BOOKKEEPING and not key.startswith("hydra"):
            raise ConfigError(
                f"rerun_from={original} repeats that run as it was, which {key}={value} would change. Leave out one of "
                "them."
            )


def _open_groups(keys: set[str]) -> set[str]:
    """Return the keys whose value is a free mapping."""
    return {key for key in keys if key.endswith(".settings")}


def _read_ablation(conf: Path, name: str) -> dict[str, Any]:
    known = sorted(path.stem for path in (conf / "ablation").glob("*.yaml"))
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean +ablation={close[0]}?" if close else ""
        raise ConfigError(
            f"+ablation={name}: there is no conf/ablation/{name}.yaml.{hint} There are {', '.join(known)}."
        )
    content = yaml.safe_load((conf / "ablation" / f"{name}.yaml").read_text())
    return content if isinstance(content, dict) else {}


def _check_group(conf: Path, group: str, value: str) -> None:
    known = sorted(path.stem for path in (conf / group).glob("*.yaml"))
    if "(" in value:  # one of Hydra's functions, choice(...): its names are checked when it composes
        return
    for name in (part.strip() for part in value.split(",")):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {group}={close[0]}?" if close else ""
            raise ConfigError(f"{group}={name} is not one of {', '.join(known)}.{hint}")


def _axes(ablation: dict[str, Any]) -> dict[str, str]:
    """Return what an ablation sweeps over, by key."""
    params = ablation.get("hydra", {}).get("sweeper", {}).get("params", {})
    return {key.lstrip("+"): str(value) for key, value in params.items()}


def _pinned(ablation: dict[str, Any]) -> dict[str, str]:
    """Return what an ablation fixes: the groups it chooses and the values it sets."""
    chosen = {}
    for entry in ablation.get("defaults", []):
        if isinstance(entry, dict):
            for key, value in entry.items():
                chosen[key.removeprefix("override").strip().lstrip("/")] = str(value)

    def leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", _TEXTS.get(value, str(value)) if isinstance(value, bool | None) else str(value)

    rest = {key: value for key, value in ablation.items() if key not in ("defaults", "hydra")}
    return chosen | dict(leaves(rest, ""))


def _pinned_by_arms(conf: Path, ablation: dict[str, Any]) -> set[str]:
    """Return the groups and values that the arms of an ablation choose, each for itself."""
    arms = [arm.strip() for arm in _axes(ablation).get("arm", "").split(",") if arm.strip()]
    return {key for arm in arms for key in _pinned(yaml.safe_load((conf / "arm" / f"{arm}.yaml").read_text()))}


def _same(one: str, other: str) -> bool:
    """Tell whether two texts are one value: 3e-4 and 0.0003, true and True."""
    try:
        return float(one) == float(other)
    except ValueError:
        return bool(yaml.safe_load(one) == yaml.safe_load(other))


def _check_axes(conf: Path, files: dict[str, dict[str, Any]], value: str) -> None:
    """Refuse several ablations that cannot be applied together without losing something."""
    if not value.startswith("["):  # one after the other
        for name in (name for name, ablation in files.items() if _axes(ablation)):
            raise ConfigError(
                f"+ablation={value} sweeps over ablations, and the axes of {name} would be lost. Start one command for "
                "each."
            )
        return
    pinned: dict[str, tuple[str, str]] = {}
    for name, ablation in files.items():
        choices = _pinned(ablation) | _axes(ablation)
        choices |= {key: choices["arm"] for key in _pinned_by_arms(conf, ablation)}
        for key, chosen in choices.items():
            other, before = pinned.setdefault(key, (name, chosen))
            if before != chosen:
                raise ConfigError(
                    f"+ablation={value}: {other} has {key}={before} and {name} has {key}={chosen}, so one of them "
                    "would be lost. Start one command for each."
                )


def _check_contradiction(conf: Path, name: str, ablation: dict[str, Any], overrides: list[tuple[str, str]]) -> None:
    by_arms = _pinned_by_arms(conf, ablation)
    for key, value in overrides:
        pinned = _pinned(ablation).get(key)
        if pinned is not None and not _same(value, pinned):
            raise ConfigError(
                f"+ablation={name} means {key}={pinned}, which {key}={value} on the same line contradicts. Leave out "
                "one of them."
            )
        if key in by_arms:
            raise ConfigError(
                f"+ablation={name} compares arms that each choose their {key}, which {key}={value} on the same line "
                "contradicts. Leave out one of them."
            )
