"""Single changes of a run in the words of its framework: other values of the keys of its files.

A change is read as the file itself is, so that one table serves both directions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from sim.base.errors import InputError, LongstepError
from sim.plan.search.space import OPTIONS
from sim.setup import names
from sim.setup.configuration import Configuration
from sim.setup.imports.facts import facts_of
from sim.setup.imports.frameworks import Framework, Key, frameworks
from sim.setup.imports.imported import Imported
from sim.setup.imports.reading import File
from sim.setup.setup import Setup

By = Literal["flag", "nearest flag", "option"]
"""Whether a change is a key of the framework; one whose value is simulated as the nearest that there is; or only an
option of Longstep."""

_VARIED = {f"schedule.{name}" for name in (*OPTIONS, "zero_stage", "shards", "weights")} | {"method", "reshard"}
"""What changes time and memory, and neither what is trained nor its numbers."""
_HALVED = {"cp": (2, 0.5), "ulysses": (2, 0.5), "ring": (2, 0.5), "tp": (2, 0.5), "micro_batch": (0.5,)}
"""Counts that are doubled or halved."""
_SCHEDULES = ("ulysses", "zigzag", "allgather")
"""What is asked of schedules where no key of the framework switches to them."""


class Change(NamedTuple):
    """One change of a run."""

    text: str
    """As the framework's file, or the command line, has it."""
    by: By
    setup: Setup
    found: Configuration
    """What that stands for."""


def changes(found: Imported, **given: Any) -> Iterator[Change]:
    """Yield the single changes of a run that make it another one, each once: keys of its framework first, then those
    that come nearest to what is simulated, then options that the framework has no key for. Fields that are ``given``
    come before what files say.
    """
    base = found.setup(**given)
    given = {**given, "gpus": base.gpus}
    seen = [_same(base.resolved())]
    flags = [*_flags(found)]
    tried = [(text, by, other) for by in ("flag", "nearest flag") for text, its, other in flags if its == by]
    unsaid = len(found.not_sayable(**given))
    for text, by, other in tried:
        try:
            setup = other.setup(**given)
            if len(other.not_sayable(**given)) > unsaid + (by == "nearest flag"):
                continue  # it says otherwise of what another key says
        except LongstepError:
            continue
        if its := _new(setup, seen):
            yield Change(text, by, setup, its)
    for text, options in _options(found, base, given):
        try:
            setup = found.setup(**options)
        except LongstepError:
            continue
        if its := _new(setup, seen):
            yield Change(text, "option", setup, its)


def _same(found: Configuration) -> tuple[object, ...]:
    return found.schedule, found.workload, found.mesh, found.options


def _new(setup: Setup, seen: list[tuple[object, ...]]) -> Configuration | None:
    """Return what a setup stands for; None where it is one of those before, or cannot be played."""
    try:
        found = setup.resolved()
    except InputError:
        return None
    same = _same(found)
    if same in seen:
        return None
    seen.append(same)
    return found


def _options(found: Imported, base: Setup, given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options of Longstep, with all that is given then."""
    has = base.resolved().options
    sets = [f"{key}={value}" for key, value in names.pairs(given.get("set", ()))]
    for name, values in OPTIONS.items():
        for value in values:
            if str(getattr(has, name, value)) != value:
                more = f"schedule.{name}={value}"
                yield f"--set {more}", {**given, "set": [*sets, more]}
    if found.understood.facts.get("cp") and not {"schedule", "stack"} & given.keys():
        for name in _SCHEDULES:
            if name != base.schedule:
                yield f"--schedule {name}", {**given, "schedule": name}


def _flags(found: Imported) -> Iterator[tuple[str, By, Imported]]:
    """Yield keys at other values, as text, and what files say then."""
    for number, (file, name) in enumerate(zip(found.files, found.frameworks, strict=True)):
        for key, meaning in _keys(file, frameworks()[name]):
            now = file.given.get(key, meaning.default)
            for value, by in _values(meaning, now, found):
                new = {key: value, **_needed(meaning, value, key, file)}
                other = File(file.path, {**file.given, **new})
                files = (*found.files[:number], other, *found.files[number + 1 :])
                anyway = found.anyway or by == "nearest flag"
                yield _shown(new, file, frameworks()[name]), by, dataclasses.replace(found, files=files, anyway=anyway)


def _keys(file: File, framework: Framework) -> Iterator[tuple[str, Key]]:
    """Yield the keys of a framework with what they mean, those that the file has first: of tables that the file has, or
    that mean something where they are missing; of frameworks that it includes, those under prefixes that the file has.
    """
    tables = {key.rpartition(".")[0] for key in file.given}
    tables |= {name.rpartition(".")[0] for name, key in framework.keys.items() if key.default is not None}
    every = [key for key in framework.keys if key.rpartition(".")[0] in {"", *tables}]
    for prefix, other in framework.includes.items():
        if any(key.startswith(prefix) for key in file.given):
            every += [f"{prefix}{key}" for key in frameworks()[other].keys]
    for key in sorted(dict.fromkeys(every), key=lambda key: key not in file.given):
        if meaning := framework.key(key):
            yield key, meaning


def _values(key: Key, now: str | None, found: Imported) -> Iterator[tuple[str, By]]:
    """Yield other values of a key that mean something else of what is varied."""
    if key.fact in _HALVED:
        said = found.understood.facts.get(key.fact)
        count = int(said.value) if said else 1
        for factor in _HALVED[key.fact]:
            if (other := int(count * factor)) != count and other == count * factor:
                yield str(other), "flag"
    if not any(fact in _VARIED for text in (*key.values.values(), key.instead) for fact in facts_of(text)):
        return
    for value, said_of_it in key.values.items():
        facts = facts_of(said_of_it)
        if value not in {now, ""} and all(fact in _VARIED for fact in facts) and _is_whole(facts, found):
            yield value, "flag"
    nearest = "true" if "false" in key.values else key.default
    if key.instead and nearest is not None and nearest not in {*key.values, now}:
        yield nearest, "nearest flag"


def _is_whole(facts: Mapping[str, str], found: Imported) -> bool:
    """Return whether nothing else has to be said: a method of two degrees wants these, too."""
    said = found.understood
    method = said.framework.methods.get(facts.get("method", ""))
    return method is None or bool(method.degree) or "factors" in said.facts


def _needed(key: Key, value: str, name: str, file: File) -> dict[str, str]:
    """Return the keys that a value needs beside it and the file has not, under the same prefix."""
    prefix = name.rpartition(".")[0]
    needs = key.needs.get(value, key.needs.get("*", ""))
    needed = {f"{prefix}.{other}" if prefix else other: text for other, text in facts_of(needs).items()}
    return {other: text for other, text in needed.items() if other not in file.given}


def _shown(given: Mapping[str, str], file: File, framework: Framework) -> str:
    """Return keys with values as a file of that kind has them."""
    kind = file.path.rpartition(".")[2].lower()
    shown = {"toml": _toml, "json": _json, "yaml": _yaml, "yml": _yaml}.get(kind)
    if shown is None:
        shown = _assigned if framework.assigns else _flag
    return " ".join(shown(key, value) for key, value in given.items())


def _literal(value: str) -> str:
    """Return a value as JSON and TOML have it."""
    is_plain = value in {"true", "false"} or value.lstrip("-").isdecimal()
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _toml(key: str, value: str) -> str:
    return f"{key} = {_literal(value)}"


def _json(key: str, value: str) -> str:
    first, *rest = key.split(".")
    inner = _literal(value)
    for name in reversed(rest):
        inner = f"{{{json.dumps(name)}: {inner}}}"
    return f"{json.dumps(first)}: {inner}"


def _yaml(key: str, value: str) -> str:
    *tables, last = key.split(".")
    return "".join(f"{name}: {{" for name in tables) + f"{last}: {value}" + "}" * len(tables)


def _assigned(key: str, value: str) -> str:
    return f"{key}={value}"


def _flag(key: str, value: str) -> str:
    flag = f"--{key.replace('_', '-')}"
    return {"true": flag, "false": f"without {flag}", "none": f"without {flag}"}.get(value, f"{flag} {value}")
