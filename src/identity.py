"""Who a run is: its variant, its label and its folder, whichever way its configuration was typed."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from src.config import Config

_LABEL_LENGTH = 80  # characters, so that a folder's name stays below every file system's limit
# Keys that do not change what is computed, or only on which machine: not part of a variant.
BOOKKEEPING = (
    "threads",
    "device",
    "root",
    "study",
    "dry",
    "rerun",
    "rerun_from",
    "retry_failed",
    "on_failure",
    "resume",
    "max_seconds",
    "export",
    "samples_logged",
    "checkpoint",
    "wandb",
)


@dataclass(frozen=True)
class Identity:
    """Who a run is: variant (8 hex digits, the configuration without seed, machine and bookkeeping), label, folder.

    `sources` are the user's own files in it, by group, as `with_content` has them.
    """

    label: str
    variant: str
    study: str
    folder: Path
    sources: dict[str, str] = field(default_factory=dict)


def identify(config: Config, defaults: Mapping[str, Any], study: str | None = None) -> Identity:
    """Return a run's identity.

    The label names the method (`baseline` for dense, nothing for sketch), the control and what differs from `defaults`,
    each by the last part of its key where no other key of the run ends alike.

    Args:
        defaults: the composed configuration with the same model, task, method and control, nothing else typed.
        study: the name where `config.study` is null, usually the ablation's; `main` without one.
    """
    values, plain = _variant_values(asdict(config)), _variant_values(defaults)
    method, control = values["method.name"], values["control.name"]
    parts = ["baseline"] if method == "dense" else [] if method == "sketch" else [method]
    if not (method == "dense" and control == "none"):
        parts.append(control)
    parts += [
        values[f"{group}.name"]
        for group, name in (("model", "tiny"), ("task", "countdown"))
        if values[f"{group}.name"] != name
    ]
    endings = Counter(key.rsplit(".", 1)[-1] for key in values)
    for key in sorted(key for key in values if key not in plain or values[key] != plain[key]):
        ending = key.rsplit(".", 1)[-1]
        parts.append(f"{ending if endings[ending] == 1 else key}={_short(values[key])}")
    label = "-".join(re.sub(r"[^A-Za-z0-9=._+]+", "_", part) for part in parts)
    variant = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    if len(label) > _LABEL_LENGTH:
        label = f"{label[: _LABEL_LENGTH - 9]}-{variant}"
    study = config.study or study or "main"
    folder = Path(config.root) / study / f"{label}-s{config.seed}-{variant}"
    sources = {key.split(".")[0]: value for key, value in values.items() if _is_source(key)}
    return Identity(label, variant, study, folder, sources)


def _variant_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = leaves({key: value for key, value in tree.items() if key not in ("seed", *BOOKKEEPING)})
    return {key: with_content(value) if _is_source(key) else value for key, value in found}


def _is_source(key: str) -> bool:
    """Tell `task.source` from a setting of that name."""
    return key.endswith(".source") and key.count(".") == 1


def with_content(source: str) -> str:
    """Return `file.py:name@digest` for `path/file.py:name`: another content is another variant, another path is not."""
    path_text, _, name = source.partition(":")
    path = Path(path_text)
    if not path.is_file():
        return source
    return f"{path.name}:{name}@{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    """Return a value as it would be typed, more or less; different numbers stay different."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case list():
            return "+".join(map(_short, value))
    return str(value)
