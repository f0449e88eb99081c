"""A user's own model, task or method: `source=path.py:name`."""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.config import ConfigError


def load_source(source: str, key: str) -> Callable[..., Any]:
    """Return the object `name` of the file `path.py`, given as `path.py:name`.

    Raises:
        ConfigError: no such file or name, or the file does not run; `key` is the configuration key that it was typed
            under.
    """
    path_text, _, name = source.partition(":")
    path = Path(path_text)
    if not name or not path.is_file():
        raise ConfigError(f"{key}={source} names no file: type {key}=PATH.py:NAME with an existing file.")
    spec = importlib.util.spec_from_file_location(f"source:{path.resolve()}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}={source}: {path} is no Python file. Type {key}=PATH.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up; a name with a colon shadows no other
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        place = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f" at line {place[-1]}" if place else ""
        raise ConfigError(f"{key}={source}: {path} fails{where} with {type(error).__name__}: {error}.") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}={source}: {path} defines no {name!r}.")
    return getattr(module, name)
