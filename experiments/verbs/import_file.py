"""``longstep import``: what a run was configured with, as a command, as Python, and key by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import tyro
from rich.console import Console
from rich.table import Table

from experiments.verbs.cli import with_flags
from experiments.verbs.shared.selection import FileSelection
from experiments.verbs.shared.terminal import print_json
from sim.base.errors import InputError
from sim.setup.imports.facts import Row
from sim.setup.spelled import command_of, fields_of, python_of

_COLUMNS = ("key", "value", "state", "means")
_MOST = 60
"""Characters of a key or a value that tables show."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import(FileSelection):
    """Read what a run was configured with, of torchtitan, Megatron-LM, DeepSpeed with Hugging Face's TrainingArguments,
    accelerate, axolotl, ms-swift, nanotron or Megatron-Bridge: as a command, as Python, and key by key.
    """

    PATHS: ClassVar[str] = "the argument FILE"
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
        said = {"setup": answer and fields_of(answer.setup), "assumptions": answer and answer.assumptions}
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
