"""``longstep import``: what a run was configured with, as a command, as Python, and key by key."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from experiments.verbs.cli import with_flags
from experiments.verbs.selection import FileSelection
from experiments.verbs.terminal import print_json
from longstep import Setup
from sim.errors import InputError
from sim.setup import names
from sim.setup.imports.facts import Row
from sim.units import length

_ALWAYS = ("model", "cluster", "gpus", "seq")
"""Fields that stand in a command whatever they are."""
_COLUMNS = ("key", "value", "state", "means")
_MOST = 60
"""Characters of a key or a value that tables show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(FileSelection):
    """Read what a run was configured with, of torchtitan, Megatron-LM, DeepSpeed with Hugging Face's TrainingArguments,
    accelerate, axolotl, ms-swift, nanotron or Megatron-Bridge: as a command, as Python, and key by key.
    """

    from_file: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(name="files")] = ()
    """FILEs: TOML, JSON, YAML, a shell script, or arguments as Megatron-LM prints them. Nothing in them is run."""
    json: bool = False
    """Print one JSON object."""


def import_file(command: Import, console: Console) -> None:
    """Print what files say; raises InputError behind that where a key that matters is not sayable."""
    if not command.from_file:
        raise InputError("import needs a configuration: name one file or more, such as train.toml")
    found, typed = command.imported(), command.typed()
    rows = found.rows(**typed)
    if not command.json:
        console.print(_table(found.title, rows))
    refused = found.not_sayable(**typed) and not command.anyway
    answer = None if refused and command.json else found.answer(**typed)
    if answer:
        answer.setup.resolved()  # or say what does not go together
    if command.json:
        said = {"setup": answer and _fields(answer.setup), "assumptions": answer and answer.assumptions}
        keys = [dict(zip(_COLUMNS, row, strict=False)) for row in rows]
        print_json({"frameworks": found.frameworks, **said, "keys": keys}, console)
    elif answer:
        for told in answer.assumptions:
            console.print(f"assumed: {with_flags(told)}", markup=False)
        console.print(f"\n{command_of(answer.setup)}\n\n{python_of(answer.setup)}", markup=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    """Return what became of each key: what is not sayable first, then what was taken, then what does not matter."""
    table = Table("key", "value", "", "what it means here", title=title, title_justify="left")
    for state in ("not sayable", "taken", "ignored"):
        for row in rows:
            if row.state == state:
                table.add_row(_short(row.key), _short(row.value), state, with_flags(row.means))
        table.add_section()
    return table


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"


def command_of(setup: Setup) -> str:
    """Return the command that predicts a setup."""
    return shlex.join(["longstep", "simulate", *_arguments(setup)])


def _arguments(setup: Setup) -> Iterator[str]:
    for name, value in _fields(setup).items():
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
    lines = [f"    {name}={_literal(value)}," for name, value in _fields(setup).items()]
    return "\n".join(["import longstep", "", "p = longstep.predict(", *lines, ")"])


def _literal(value: Any) -> str:
    """Return a value as it stands in a program."""
    if isinstance(value, str) and type(value) is not str:  # a schedule of one's own says that it is one
        return f"longstep.{type(value).__name__}({_literal(str(value))})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | dict) else repr(value)


def _fields(setup: Setup) -> dict[str, Any]:
    """Return the fields that are not what they are by default, as they are typed."""
    fields = {field.name: (getattr(setup, field.name), field.default) for field in dataclasses.fields(Setup)}
    found = {name: value for name, (value, default) in fields.items() if value != default or name in _ALWAYS}
    found["seq"] = length(names.tokens("seq", setup.seq))
    return found | ({"set": dict(names.pairs(setup.set))} if setup.set else {})
