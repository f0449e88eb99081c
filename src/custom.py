"""A user's own model, task or method: `source=path.py:name`."""

import sys
import traceback
import types
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
    # Not by an importer: it takes compiled code for current within a second of an edit, and writes beside the file.
    module = types.ModuleType(f"source:{path.resolve()}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up; a name with a colon shadows no other
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except Exception as error:
        place = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f" at line {place[-1]}" if place else ""
        raise ConfigError(f"{key}={source}: {path} fails{where} with {type(error).__name__}: {error}.") from error
    if not hasattr(module, name):
        raise ConfigError(f"{key}={source}: {path} defines no {name!r}.")
    return getattr(module, name)
