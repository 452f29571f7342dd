"""What a sweep varies: fields of ``Setup`` and figures that can be ``set``, in lists, ranges, products and zips."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from sim.balance.documents import BY_BLOCKS, planned_by
from sim.base.errors import InputError, none_of
from sim.setup.names import SET_ROOTS, text_of, tokens
from sim.setup.setup import Setup
from sim.words.workload import parse_length

_TYPES = {name: hint for name, hint in get_type_hints(Setup).items() if name not in {"_", "set"}}
_RANGE = re.compile(r"(?P<low>[^.].*?)\.\.(?P<high>.+?)(?P<kind>[*+:])(?P<step>[^*+:]+)")
_SHOWN = 40
"""Characters of a list that an error repeats."""
_MOST = 10**6
"""Combinations: a row each."""
MOST_TYPED, MOST_ROWS = 1000, 100
"""Values of an option; and rows that are kept to be shown beside each other, where none are written to a file."""
LISTS = {
    "model": "llama3-8b,llama3-70b", "cluster": "hgx-h100,dgx-a100", "nodes": "1,2,4", "gpus": "8,16,64", "cp": "2,4,8",
    "seq": "64K,128K", "schedule": "ring,ulysses", "software": "torchtitan,huggingface",
    "stack": "fsdp,alst", "global_batch": "16,32", "tp_degree": "1,2,4",
    "pp_degree": "1,2,4",
}  # fmt: skip
"""Fields of which an option of the command line may list several, with an example."""
_COUNTS = ("nodes", "gpus", "cp", "seq", "tp_degree", "pp_degree")
"""Of these, those that are numbers, so that a range is a list, too."""


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
            "`vary` is empty: give it keys such as seq or cluster.nvlink.bytes_per_s, each with some values; an option "
            "of the command line lists them by itself, as `seq` 64K,128K"
        )
    listed = {field_of(key): _values(key, values) for key, values in vary.items()}
    together = [[field_of(key) for key in keys] for keys in zipped]
    _require_zips(together, {key: len(values) for key, values in listed.items()})
    groups = [*map(tuple, together), *((key,) for key in listed if not any(key in keys for keys in together))]
    groups.sort(key=lambda keys: list(listed).index(keys[0]))
    axes = [Axis(keys, tuple(zip(*(listed[key] for key in keys), strict=True))) for keys in groups]
    count = math.prod(len(axis.values) for axis in axes)
    if count > _MOST:
        raise InputError(f"`vary` has {count} combinations: allowed are {_MOST}; leave out some values")
    return axes


def _require_zips(together: Sequence[Sequence[str]], counts: Mapping[str, int]) -> None:
    """Raise InputError for keys that are zipped and not varied, or in two zips, or have unlike numbers of values."""
    for keys in together:
        for key in keys:
            if key not in counts:
                raise InputError(none_of("key of `zip`", key, counts))
            if sum(key in other for other in together) > 1:
                raise InputError(f"`zip` {key}: it is in two of them; name each key once")
        if len({counts[key] for key in keys}) > 1:
            spelled = ", ".join(f"{count} of {key}" for key, count in {key: counts[key] for key in keys}.items())
            raise InputError(f"`zip` {','.join(keys)}: has {spelled}; give each key as many values")


def is_list(field: str, text: str) -> bool:
    """Return whether an option lists several values, with commas or as a range."""
    return field in LISTS and ("," in text or (field in _COUNTS and ".." in text))


def values_of(field: str, text: str) -> list[str]:
    """Return the values that an option lists; raises InputError that names it for a list that is none.

    >>> values_of("gpus", "8,16,64"), values_of("seq", "64K..256K*2")
    (['8', '16', '64'], ['65536', '131072', '262144'])
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"`{field}` {_shortened(text)}: expected values separated by commas, such as {LISTS[field]}")
    found = [value for part in parts for value in (_ranged(f"`{field}` ", field, part) if field in _COUNTS else [part])]
    if len(found) > MOST_TYPED:
        raise InputError(f"`{field}` has {len(found)} values: at most {MOST_TYPED} are taken; leave out some")
    _require_once(f"`{field}`", field, found)
    return found


def rows_of(lists: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return the product of lists of options, a row each, the last one varying fastest: one row of none."""
    if (count := math.prod(map(len, lists.values()))) > MOST_ROWS:
        spelled = " x ".join(f"{len(values)} of `{field}`" for field, values in lists.items())
        raise InputError(
            f"{spelled} are {count} rows: at most {MOST_ROWS} are shown; leave out some, or let sweep write them"
        )
    return combinations([Axis((field,), tuple((value,) for value in values)) for field, values in lists.items()])


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _require_once(where: str, key: str, values: Sequence[str]) -> None:
    """Raise InputError for a value that stands there twice: 64K is 65536."""
    seen = set[object]()
    for value in values:
        same = tokens(key, value) if key == "seq" and _is_length(value) else value
        if same in seen:
            raise InputError(f"{where}: {value} stands there twice; name each value once")
        seen.add(same)


def _is_length(text: str) -> bool:
    return bool(re.fullmatch(r"\d{1,12}[KMkm]?", text))


def limits(key: str, between: str) -> tuple[float, float]:
    """Return the ends of a range LOW..HIGH; raises InputError for any other text."""
    low, dots, high = between.partition("..")
    where = f"`along` {key}="
    ends = _number(where, between, low), _number(where, between, high) if dots else 0.0
    if not 0 < ends[0] < ends[1]:
        raise InputError(f"`along` {key}={between}: expected LOW..HIGH such as 64K..4M")
    return ends


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Return the values of all keys, the last axis varying fastest."""
    keys = [key for axis in axes for key in axis.keys]
    found = product(*(axis.values for axis in axes))
    return [dict(zip(keys, [value for values in one for value in values], strict=True)) for one in found]


def changed(setup: Setup, values: Mapping[str, str]) -> Setup:
    """Return a setup with other values of some keys; a schedule may be a planner of documents. Raises InputError for a
    text that is no value of its field.
    """
    fields = {key: _typed(key, value) for key, value in values.items() if "." not in key}
    setting = {key: value for key, value in values.items() if "." in key}
    found = setup.replace(**fields, **({"set": setting} if setting else {}))
    return planned_by(found) if found.schedule in BY_BLOCKS else found


def field_of(key: str) -> str:
    """Return the library's name of a key, which may be an option of the command line; raises InputError for an unknown
    one.
    """
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
        found = [value for text in values.split(",") for value in _ranged(f"`vary` {key}=", key, text.strip())]
    if not found or not all(found):
        raise InputError(f"`vary` {key}={values}: expected values such as 64K,128K or a range such as 64K..1M*2")
    _require_once(f"`vary` {key}", key, found)
    return found


def _ranged(where: str, key: str, text: str) -> list[str]:
    """Return the values of a range, or the one that a text is; ``where`` begins what is said of a wrong one."""
    found = _RANGE.fullmatch(text)
    if not found:
        return [text]
    whole = "." not in key
    low, high = (_number(where, text, found[name]) for name in ("low", "high"))
    step = _number(where, text, found["step"])
    kind, values = found["kind"], [low]
    if not 0 < low <= high or not (step > 1 if kind == "*" else step > 0 if kind == "+" else step >= 2):
        raise InputError(f"{where}{text}: expected LOW..HIGH*FACTOR, LOW..HIGH+STEP or LOW..HIGH:COUNT, rising")
    if kind == ":":
        ratio = (high / low) ** (1 / (step - 1))
        values = [low * ratio**number for number in range(int(min(step, _MOST + 1)))]
    while kind != ":" and len(values) <= _MOST:
        following = values[-1] * step if kind == "*" else values[-1] + step
        if following > high * (1 + 1e-9):
            break
        values.append(following)
    return [str(round(value)) if whole else f"{value:.12g}" for value in values]


def _number(where: str, text: str, part: str) -> float:
    try:
        return (
            float(part)
            if re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", part)
            else float(parse_length(part, "a value of `vary`"))
        )
    except (ValueError, InputError):
        raise InputError(f"{where}{text}: {part!r} is no number") from None


def _typed(key: str, text: str) -> Any:
    """Return the value of a field that a text stands for."""
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
