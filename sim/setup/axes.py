"""What a sweep varies: fields of ``Setup`` and figures that can be ``set``, in lists, ranges, products and zips."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from sim.errors import InputError, none_of
from sim.setup.names import SET_ROOTS, text_of
from sim.setup.setup import Setup
from sim.workload import parse_length

_TYPES = {name: hint for name, hint in get_type_hints(Setup).items() if name not in {"_", "set"}}
_RANGE = re.compile(r"(?P<low>[^.].*?)\.\.(?P<high>.+?)(?P<kind>[*+:])(?P<step>[^*+:]+)")
_MOST = 10**6
"""Combinations: a row each."""


class Axis(NamedTuple):
    """Keys that are varied together."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    """One of each key at a time."""


def axes_of(vary: Mapping[str, Sequence[object] | str], zipped: Sequence[Sequence[str]] = ()) -> list[Axis]:
    """Return the axes that are varied: each key alone, but those that are ``zipped`` together.

    Values are a list, or a text: ``64K,128K``, or a range: ``64K..1M*2`` is 64K times 2 until 1M, ``8..64+8`` steps by
    8, ``1e11..1e12:5`` are 5 values at equal ratios. Raises InputError for a key that neither ``Setup`` nor ``set``
    knows, and for values that do not make an axis.

    >>> [axis.values for axis in axes_of({"seq": "64K..256K*2"})]
    [(('65536',), ('131072',), ('262144',))]
    """
    if not vary:
        raise InputError(
            "`vary` is empty: give it keys such as seq or cluster.nvlink.bytes_per_s, each with some values"
        )
    listed = {field_of(key): _values(key, values) for key, values in vary.items()}
    together = [[field_of(key) for key in keys] for keys in zipped]
    for keys in together:
        for key in keys:
            if key not in listed:
                raise InputError(none_of("key of `zip`", key, listed))
            if sum(key in other for other in together) > 1:
                raise InputError(f"`zip` {key}: it is in two of them; name each key once")
        counts = {key: len(listed[key]) for key in keys}
        if len(set(counts.values())) > 1:
            spelled = ", ".join(f"{count} of {key}" for key, count in counts.items())
            raise InputError(f"`zip` {','.join(keys)}: has {spelled}; give each key as many values")
    groups = [*map(tuple, together), *((key,) for key in listed if not any(key in keys for keys in together))]
    groups.sort(key=lambda keys: list(listed).index(keys[0]))
    axes = [Axis(keys, tuple(zip(*(listed[key] for key in keys), strict=True))) for keys in groups]
    count = math.prod(len(axis.values) for axis in axes)
    if count > _MOST:
        raise InputError(f"`vary` has {count} combinations: allowed are {_MOST}; leave out some values")
    return axes


def limits(key: str, between: str) -> tuple[float, float]:
    """Return the ends of a range LOW..HIGH; raises InputError for what is none."""
    low, dots, high = between.partition("..")
    ends = _number(key, between, low), _number(key, between, high) if dots else 0.0
    if not 0 < ends[0] < ends[1]:
        raise InputError(f"`along` {key}={between}: expected LOW..HIGH such as 64K..4M")
    return ends


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Return the values of all keys, the last axis varying fastest."""
    keys = [key for axis in axes for key in axis.keys]
    found = product(*(axis.values for axis in axes))
    return [dict(zip(keys, [value for values in one for value in values], strict=True)) for one in found]


def changed(setup: Setup, values: Mapping[str, str]) -> Setup:
    """Return a setup with other values of some keys; raises InputError for a text that is no value of its field."""
    fields = {key: _typed(key, value) for key, value in values.items() if "." not in key}
    setting = {key: value for key, value in values.items() if "." in key}
    return setup.replace(**fields, **({"set": setting} if setting else {}))


def field_of(key: str) -> str:
    """Return what the library calls a key, which may be an option of the command line; raises InputError for none."""
    root, dot, _ = key.partition(".")
    if dot:
        if root not in SET_ROOTS:
            raise InputError(none_of("prefix", root, SET_ROOTS))
        return key
    name = key.strip().removeprefix("--").replace("-", "_")
    name = {"pass": "passes"}.get(name, name)
    if name not in _TYPES:
        raise InputError(none_of("key of `vary`", key, [*_TYPES, *(f"{root}." for root in SET_ROOTS)]))
    return name


def _values(key: str, values: Sequence[object] | str) -> list[str]:
    if not isinstance(values, str):
        found = [text_of(value) for value in values]
    else:
        found = [value for text in values.split(",") for value in _ranged(key, text.strip())]
    if not found or not all(found):
        raise InputError(f"`vary` {key}={values}: expected values such as 64K,128K or a range such as 64K..1M*2")
    twice = [value for number, value in enumerate(found) if value in found[:number]]
    if twice:
        raise InputError(f"`vary` {key}: {twice[0]} stands there twice; name each value once")
    return found


def _ranged(key: str, text: str) -> list[str]:
    """Return the values of a range, or the one that a text is."""
    found = _RANGE.fullmatch(text)
    if not found:
        return [text]
    whole = "." not in key
    low, high = (_number(key, text, found[name]) for name in ("low", "high"))
    step = _number(key, text, found["step"])
    kind, values = found["kind"], [low]
    if not 0 < low <= high or not (step > 1 if kind == "*" else step > 0 if kind == "+" else step >= 2):
        raise InputError(f"`vary` {key}={text}: expected LOW..HIGH*FACTOR, LOW..HIGH+STEP or LOW..HIGH:COUNT, rising")
    if kind == ":":
        ratio = (high / low) ** (1 / (step - 1))
        values = [low * ratio**number for number in range(int(step))]
    while kind != ":" and len(values) <= _MOST:
        following = values[-1] * step if kind == "*" else values[-1] + step
        if following > high * (1 + 1e-9):
            break
        values.append(following)
    return [str(round(value)) if whole else f"{value:.12g}" for value in values]


def _number(key: str, text: str, part: str) -> float:
    try:
        return (
            float(part)
            if re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", part)
            else float(parse_length(part, "a value of `vary`"))
        )
    except (ValueError, InputError):
        raise InputError(f"`vary` {key}={text}: {part!r} is no number") from None


def _typed(key: str, text: str) -> Any:
    """Return the value that a text is of a field."""
    hint = _TYPES[key]
    takes = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    if text == "none" and type(None) in takes:
        return None
    if bool in takes and text in {"true", "false"}:
        return text == "true"
    if str in takes:
        return text
    for kind in (int, float):
        if kind in takes:
            try:
                return kind(text)
            except ValueError:
                continue
    expected = " or ".join("none" if kind is type(None) else kind.__name__ for kind in takes)
    raise InputError(f"`vary` {key}={text}: expected {'true or false' if bool in takes else expected}")
