"""Checks of configuration values. Errors name the key, what was expected, what was given, what to set."""

import math
import types
import typing
from typing import Any, Literal


def _conforms(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_conforms(value, argument) for argument in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is list:
        return isinstance(value, list) and all(_conforms(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_float(hint: Any) -> bool:
    return hint is float or float in typing.get_args(hint)


_TYPE_NAMES = {
    float: "a finite number",
    int: "an integer",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is list:
        return f"a list of: {_describe(arguments[0])}"
    if origin is dict:
        return "a mapping"
    return _TYPE_NAMES.get(hint, f"a {hint.__name__}" if hasattr(hint, "__name__") else str(hint))


def check_types(config: Any, section: str) -> None:
    """Refuses fields of a dataclass that do not fit their annotations; integers become floats where due."""
    for name, hint in typing.get_type_hints(type(config)).items():
        key = f"{section}.{name}" if section else name
        value = getattr(config, name)
        if not _conforms(value, hint):
            raise ValueError(f"{key}: expected {_describe(hint)}, got {value!r}")
        if _is_float(hint) and value is not None:
            object.__setattr__(config, name, float(value))


def expect(ok: bool, key: str, expected: str, got: Any, remedy: str) -> None:
    """Refuses an impossible value."""
    if not ok:
        raise ValueError(f"{key}: expected {expected}, got {got!r}. Set {remedy}")


def refuse(meaningless: bool, key: str, got: Any, because: str, remedy: str) -> None:
    """Refuses a value that another option makes meaningless."""
    if meaningless:
        raise ValueError(f"{key}: {got!r} means nothing {because}. Set {remedy}")


def check_range(key: str, value: float | None, at_least: float) -> None:
    """Refuses a number below `at_least`; None means that the option is off."""
    expect(value is None or value >= at_least, key, f"a number >= {at_least}", value, f"e.g. {at_least}")
