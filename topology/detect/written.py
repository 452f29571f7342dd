"""Structs as TOML files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec


def stated(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that have another value than by default, as plain data."""
    found = {}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if isinstance(value, msgspec.Struct):
            found[field.name] = stated(value)
        elif value != field.default and value not in ({}, ""):
            found[field.name] = msgspec.to_builtins(value, str_keys=True)
    return found


def _leaves(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        path = f"{prefix}.{key}"
        if isinstance(value, dict):
            yield from _leaves(value, path)
        elif value is not None:
            yield path


def leaf_paths(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the dotted path of each figure of a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaf_paths(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}"


def toml_lines(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a table: its figures, then its tables; what JSON calls a text, a whole number or a flag TOML
    does, too.
    """
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from ("", f"[{prefix}{_key(key)}]")
            yield from toml_lines(value, f"{prefix}{_key(key)}.")


def _value(value: object) -> str:
    """Return a value as TOML has it: floats as people write them, where that is the same number; the rest as JSON."""
    if isinstance(value, float) and abs(value) >= 1e6:
        power = min(12, int(math.log10(abs(value))) // 3 * 3)
        text = f"{value / 10**power:.15g}e{power}"
        return text if float(text) == value else repr(value)
    return msgspec.json.encode(value).decode()


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key) else msgspec.json.encode(key).decode()
