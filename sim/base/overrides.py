"""Figures of a spec replaced, as ``--set`` takes them: ``nvlink.bytes_per_s=*2``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from sim.base.errors import InputError, unknown
from sim.base.presets import explained, told

Spec = TypeVar("Spec")


def override(spec: Spec, changes: Sequence[tuple[str, str]], where: str) -> Spec:
    """Return ``spec``, a struct or a dataclass, with the figures at some paths replaced in turn. The result is
    validated.

    A path is dotted (``nvlink.bytes_per_s``); ``gpu[3].speed`` addresses one device (the field ``per_gpu``). Beside it
    stands a value, or ``*2`` and ``/2`` relative to the present one; of words and numbers that may be left out
    ``none``, of words several as ``qkv+out``. Raises InputError that names the keys allowed.
    """
    kind: type = type(spec)
    data = _stated(spec, kind)
    for path, text in changes:
        if text == "none" and path in _numbers(kind):
            data[path] = None
        else:
            _replace(data, path, text, where)
    data = _left_out(data, spec, kind)
    try:
        return msgspec.convert(data, type(spec), strict=False)
    except msgspec.ValidationError as error:
        at = [(path, text) for path, text in changes if told(error)[1] == ".".join(_keys(path))]
        given = ", ".join(f"{_option(where, path)}={text}" for path, text in at or changes)
        raise InputError(f"{given}: {explained(error, type(spec), None if at else data)}") from error


def _stated(spec: object, kind: type) -> dict[str, Any]:
    """Return a spec as plain data in which fields that it leaves out have a value to replace: False, None or a text."""
    data: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True)
    data |= dict.fromkeys(_unset_flags(spec, kind), False)
    data |= {name: data.get(name) for name in _numbers(kind)}
    return data | {name: _joined(data.get(name, "")) for name in _words(kind)}


def _left_out(data: dict[str, Any], spec: object, kind: type) -> dict[str, Any]:
    """Return plain data as structs take it: several words as a list, and no fields that are left out."""
    words, numbers = _words(kind), _numbers(kind)
    for name, several in words.items():
        text = "" if data[name] == "none" else data[name]
        data[name] = text.split("+") if several and text else text
    absent = {name for name in (*_unset_flags(spec, kind), *words) if not data[name]}
    absent |= {name for name in numbers if data[name] is None}
    return {name: value for name, value in data.items() if name not in absent}


def _unset_flags(spec: object, kind: type) -> set[str]:
    """Return the fields of a struct that may be true, and are left out where they are not."""
    return {name for name in _flags(kind) if getattr(spec, name) is msgspec.UNSET}


def _fields(kind: type) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a struct; no field of a dataclass may be left out."""
    return msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else ()


@cache
def _flags(kind: type) -> tuple[str, ...]:
    """Return the fields of a struct that may be true."""
    return tuple(one.name for one in _fields(kind) if bool in get_args(one.type))


@cache
def _numbers(kind: type) -> tuple[str, ...]:
    """Return the fields of a struct that may be left out and else are a number."""
    found = []
    for one in _fields(kind):
        hints = get_args(one.type) if msgspec.UnsetType in get_args(one.type) else ()
        if any((get_args(hint) or (hint,))[0] in {int, float} for hint in hints):
            found.append(one.name)
    return tuple(found)


@cache
def _words(kind: type) -> dict[str, bool]:
    """Return the fields of a struct that may be left out and else are one of some words, or several: whether they may
    be several.
    """
    found = {}
    for one in _fields(kind):
        hints = get_args(one.type) if msgspec.UnsetType in get_args(one.type) else ()
        for hint in (get_args(hint)[0] if get_origin(hint) is Annotated else hint for hint in hints):
            several = get_origin(hint) is tuple
            if get_origin(get_args(hint)[0] if several else hint) is Literal:
                found[one.name] = several
    return found


def _joined(words: str | Sequence[str]) -> str:
    """Return a word, or several as ``set`` takes them: joined by +."""
    return words if isinstance(words, str) else "+".join(words)


def _keys(path: str) -> list[str]:
    """Return the names of the fields that a path leads through."""
    return re.sub(r"(\w+)\[(\d+)\]", r"per_\1.\2", path).split(".")


def _replace(data: dict[str, Any], path: str, text: str, where: str) -> None:
    """Replace the figure at one path; raises InputError if there is none, or ``text`` is no such value."""
    keys, node = _keys(path), data
    for depth, key in enumerate(keys[:-1]):
        if keys[0].startswith("per_") and depth == 1:
            node.setdefault(key, {"speed": 1.0})
        if not isinstance(node.get(key), dict):
            raise unknown("key", path, _leaves(data), where)
        node = node[key]
    if keys[-1] not in node or isinstance(node[keys[-1]], dict):
        raise unknown("key", path, _leaves(data), where)
    node[keys[-1]] = _parsed(text, node[keys[-1]], path, where)


def _parsed(text: str, present: object, path: str, where: str) -> object:
    """Return ``text`` as the kind of value that stands there now."""
    if isinstance(present, str):
        return text
    relative = text[:1] if text[:1] in {"*", "/"} else ""
    if isinstance(present, bool):
        if text.lower() in {"true", "false"}:
            return text.lower() == "true"
        raise InputError(f"{_option(where, path)}={text}: expected true or false")
    try:
        number = float(text.removeprefix(relative)) if relative else float(text)
    except ValueError as error:
        if present is None:
            return text
        raise InputError(
            f"{_option(where, path)}={text}: expected a number, or *NUMBER to scale the present one"
        ) from error
    if relative:
        if not isinstance(present, int | float):
            raise InputError(f"{_option(where, path)}={text}: there is no present value to scale; give a number")
        if relative == "/" and number == 0:
            raise InputError(f"{_option(where, path)}={text}: cannot divide by zero")
        number = present * number if relative == "*" else present / number
    if not math.isfinite(number):
        raise InputError(f"{_option(where, path)}={text}: expected a finite number")
    return int(number) if isinstance(present, int) and number == int(number) else number


def _option(where: str, path: str) -> str:
    """Return what the user typed: ``where`` ends with a dot or a blank where the path goes on."""
    return where + path if where.endswith((".", " ")) else f"{where} {path}"


def _leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted paths of all figures in ``data``, in the form that ``--set`` takes."""
    paths: list[str] = []
    for key, value in data.items():
        if key in {"sources", "notes"}:
            continue
        if key.startswith("per_") and isinstance(value, dict):
            paths.append(f"{key.removeprefix('per_')}[N].speed")
        elif isinstance(value, dict):
            paths += _leaves(value, f"{prefix}{key}.")
        else:
            paths.append(f"{prefix}{key}")
    return paths
