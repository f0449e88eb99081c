"""Plain values into typed dataclasses: ranges, choices, and errors that name the key."""

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A value or a key that cannot be used; the message is for the person who typed it."""


@dataclass(frozen=True)
class Range:
    """The numbers low..high; `above` excludes the lower end. Infinite and NaN lie in no range."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if isinstance(value, int) and abs(value) > 2**63:  # more than any counter holds
            return False
        return math.isfinite(value) and (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        text = f"{'above' if self.above else 'at least'} {self.low:g}"
        return text if self.high == math.inf else f"{text} and at most {self.high:g}"


Count = Annotated[int, Range(1)]
Size = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


def nearest(key: str, keys: set[str]) -> str:
    """Return ` Did you mean ...?` with the most similar key, or an empty string."""
    last_parts = {name: name.rsplit(".", 1)[-1] for name in keys}
    found = difflib.get_close_matches(key, sorted(keys), n=1, cutoff=0.75)
    last = key.rsplit(".", 1)[-1]
    found = found or [name for name in sorted(keys) if last_parts[name] == last]
    close = difflib.get_close_matches(last, sorted(set(last_parts.values())), n=1, cutoff=0.7)
    found = found or [name for name in sorted(keys) if last_parts[name] in close]
    return f" Did you mean {found[0]}?" if found else ""


def known(kind: Any, prefix: str = "") -> set[str]:
    """Return every dotted key of a dataclass, in any choice of the classes of its fields."""
    keys = set()
    for field, hint in get_type_hints(kind, include_extras=True).items():
        keys.add(f"{prefix}{field}")
        for inner in _options(hint):
            if is_dataclass(inner):
                keys |= known(inner, f"{prefix}{field}.")
    return keys


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def convert(kind: Any, value: Any, key: str = "") -> Any:
    """Return `value` as a `kind`, a dataclass or a type of one of its fields; `key` is its dotted name.

    Raises:
        ConfigError: an unknown or missing key, a value of a wrong type or out of range.
    """
    options = _options(kind)
    classes = [option for option in options if is_dataclass(option)]
    if value is None and type(None) in options:
        return None
    if classes:
        return _convert_class(classes, value, key)
    for option in options:
        converted = _plain(option, value)
        if converted is not None:
            return converted[0]
    raise ConfigError(f"{key} must be {' or '.join(_describe(option) for option in options)}, got {value!r}.")


def _convert_class(classes: list[Any], value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a group of keys, got {value!r}.")
    chosen = classes[0]
    if len(classes) > 1:
        names = {get_args(get_type_hints(option)["name"])[0]: option for option in classes}
        if not isinstance(value.get("name"), str) or value["name"] not in names:
            raise ConfigError(f"{key}.name must be one of {', '.join(names)}, got {value.get('name')!r}.")
        chosen = names[value["name"]]
    hints = get_type_hints(chosen, include_extras=True)
    dot = f"{key}." if key else ""
    for name in value:
        if name not in hints:
            where = f" of {key}={value['name']}" if len(classes) > 1 else ""
            keys = {f"{dot}{field}" for field in hints} if key else known(chosen)
            raise ConfigError(f"{dot}{name} is not a key{where}.{nearest(f'{dot}{name}', keys)}")
    missing = [field.name for field in fields(chosen) if value.get(field.name, "???") == "???"]
    if missing:
        raise ConfigError(f"{dot}{missing[0]} has no value: type {dot}{missing[0]}=VALUE.")
    return chosen(**{name: convert(hint, value[name], f"{dot}{name}") for name, hint in hints.items()})


def _plain(hint: Any, value: Any) -> tuple[Any] | None:
    """Return (converted value,) where the value fits the type and the range, else None."""
    within = None
    if get_origin(hint) is Annotated:
        hint, within = get_args(hint)
    origin = get_origin(hint)
    if origin is Literal:
        return (value,) if value in get_args(hint) and not isinstance(value, bool) else None
    if origin is list:
        (inner,) = get_args(hint)
        converted = [_plain(inner, item) for item in value] if isinstance(value, list) else [None]
        return None if None in converted else ([item[0] for item in converted if item is not None],)
    if origin is dict:
        return (dict(value),) if isinstance(value, Mapping) else None
    if hint is Any:
        return (value,)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (within is not None and value not in within):
        return None
    return (value,)


def _describe(hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "null",
    }
    if get_origin(hint) is Annotated:
        plain, within = get_args(hint)
        return f"{words[plain]} {within}"
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])
    return words.get(hint, "a list" if get_origin(hint) is list else "a group of keys")
