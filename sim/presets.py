"""Named presets and the user's own files, decoded into Structs; and ``--set`` overrides of them.

A leaf like ``sim.errors``: clusters, models and profiles are all read by the functions below, so that an unknown
name, a missing file, an unknown key and a wrong value read alike everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sim.errors import InputError, unknown

T = TypeVar("T", bound=msgspec.Struct)
Spec = TypeVar("Spec")


def preset_names(folder: str, suffix: str = ".toml") -> list[str]:
    """Return the names of the presets that ship in ``folder`` (``package/subfolder``), sorted; none is no error."""
    package, _, sub = folder.partition("/")
    place = resources.files(package).joinpath(sub)
    files = place.iterdir() if place.is_dir() else ()
    return sorted(f.name.removesuffix(suffix) for f in files if f.name.endswith(suffix))


def load_toml(what: str, name: str, struct: type[T], folder: str, where: str) -> T:
    """Return the ``struct`` that the preset or the TOML file called ``name`` describes.

    Raises InputError if there is no such preset or file, or if a key or a value does not fit ``struct``.
    """
    if name.endswith(".toml") or "/" in name:
        data = read_bytes(what, name, where)
    elif name in preset_names(folder):
        package, _, sub = folder.partition("/")
        data = resources.files(package).joinpath(sub, f"{name}.toml").read_bytes()
    else:
        raise unknown(what, name, [*preset_names(folder), "FILE.toml"], where)
    try:
        return msgspec.toml.decode(data, type=struct, strict=False)
    except msgspec.DecodeError as error:
        raise InputError(f"{what} {name!r}: {error}; change it in that file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {name!r} is not a text file; {where} takes a TOML file") from error


def read_bytes(what: str, path: str, where: str) -> bytes:
    """Return the content of a file that the user named; raises InputError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        file = what if what.endswith("file") else f"{what} file"
        raise InputError(f"{file} {path!r} cannot be read ({error.strerror}); set it with {where}") from error


def override(spec: Spec, changes: Sequence[tuple[str, str]], where: str) -> Spec:
    """Return ``spec``, a struct or a dataclass, with the figures at some paths replaced, in turn, and then seen to be
    valid together.

    A path is dotted (``nvlink.bytes_per_s``); ``gpu[3].speed`` addresses one device (the field ``per_gpu``). Beside it
    stands a value, or ``*2`` and ``/2`` relative to the present one. Raises InputError that names the keys allowed.
    """
    data: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True)
    for path, text in changes:
        _replace(data, path, text, where)
    try:
        return msgspec.convert(data, type(spec), strict=False)
    except msgspec.ValidationError as error:
        at = [(path, text) for path, text in changes if str(error).endswith(f" - at `$.{'.'.join(_keys(path))}`")]
        hint = _hint(type(spec), _keys(at[-1][0])) if at else None
        allowed = f": allowed are {', '.join(map(str, get_args(hint)))}" if get_origin(hint) is Literal else ""
        given = ", ".join(f"{_option(where, path)}={text}" for path, text in at or changes)
        raise InputError(f"{given}: {error}{allowed}") from error


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


def _hint(owner: Any, keys: Sequence[str]) -> Any:
    """Return the type of a field at the end of a path of fields; None if there is none such."""
    for key in keys:
        candidates = (owner, *get_args(owner))  # of an optional struct the struct
        owner = next((get_type_hints(one).get(key) for one in candidates if isinstance(one, type)), None)
    return owner


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
    """Return what the user typed: ``where`` ends with a dot where the path goes on."""
    return where + path if where.endswith(".") else f"{where} {path}"


def _leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted paths of all figures in ``data``, in the form that ``--set`` takes."""
    paths: list[str] = []
    for key, value in data.items():
        if key == "sources":
            continue
        if key.startswith("per_") and isinstance(value, dict):
            paths.append(f"{key.removeprefix('per_')}[N].speed")
        elif isinstance(value, dict):
            paths += _leaves(value, f"{prefix}{key}.")
        else:
            paths.append(f"{prefix}{key}")
    return paths
