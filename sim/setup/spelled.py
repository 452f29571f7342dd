"""A setup as a user would type it: as a command, and as Python."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from typing import Any

from sim.base.units import length
from sim.setup import names
from sim.setup.setup import Setup

_ALWAYS = ("model", "cluster", "gpus", "seq")
"""Fields that stand in a command also where they are as by default."""


def command_of(setup: Setup) -> str:
    """Return the command that predicts a setup."""
    return shlex.join(["longstep", "simulate", *_arguments(setup)])


def _arguments(setup: Setup) -> Iterator[str]:
    for name, value in fields_of(setup).items():
        if name == "set":
            for key, one in value.items():
                yield from ("--set", f"{key}={one}")
        elif value is True:
            yield f"--{name.replace('_', '-')}"
        else:
            yield from (f"--{name.replace('_', '-').replace('passes', 'pass')}", _text(value))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def python_of(setup: Setup) -> str:
    """Return the same in Python."""
    lines = [f"    {name}={_literal(value)}," for name, value in fields_of(setup).items()]
    return "\n".join(["import longstep", "", "p = longstep.predict(", *lines, ")"])


def _literal(value: Any) -> str:
    """Return a value as it stands in a program."""
    if isinstance(value, str) and type(value) is not str:  # a schedule of one's own says that it is one
        return f"longstep.{type(value).__name__}({_literal(str(value))})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | dict) else repr(value)


def fields_of(setup: Setup) -> dict[str, Any]:
    """Return the fields that are not what they are by default, as they are typed."""
    fields = {field.name: (getattr(setup, field.name), field.default) for field in dataclasses.fields(Setup)}
    found = {name: value for name, (value, default) in fields.items() if value != default or name in _ALWAYS}
    found = {name: value for name, value in found.items() if value is not None}
    found["seq"] = length(names.tokens("seq", setup.seq))
    return found | ({"set": dict(names.pairs(setup.set))} if setup.set else {})
