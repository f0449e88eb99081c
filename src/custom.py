"""A user's own model, task or method: `source=path.py:name`."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.config import ConfigError


def load_source(source: str, key: str) -> Callable[..., Any]:
    """Return the object `name` of the file `path.py`, given as `path.py:name`.

    Raises:
        ConfigError: no such file or name; `key` is the configuration key that it was typed under.
    """
    path_text, _, name = source.partition(":")
    path = Path(path_text)
    if not name or not path.is_file():
        raise ConfigError(f"{key}={source} names no file: type {key}=PATH.py:NAME with an existing file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ConfigError(f"{key}={source}: {path} defines no {name!r}.")
    return getattr(module, name)
