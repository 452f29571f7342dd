"""What one or several files say of a run: key by key, and as a setup."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from sim.base.errors import InputError
from sim.setup.imports.facts import Row, Said, Understood, understood
from sim.setup.imports.frameworks import framework_of, frameworks
from sim.setup.imports.model import model_of
from sim.setup.imports.reading import File, read
from sim.setup.imports.writing import Answer, Writer, degree_of
from sim.setup.setup import Setup

_ALONE = {
    "pp": ("of_stages", "of a pipeline, and there is one stage"),
    "tp": ("of_shares", "of tensor parallelism, and ranks have whole weights"),
}
"""By degree the field of rows that do not matter where it is 1, and why they do not."""


@dataclasses.dataclass(frozen=True)
class Imported:
    """What one or several files say of a run.

    ``setup`` is what to predict, ``rows`` say of each key what became of it. Both take fields of a setup that come
    before what files say.

    >>> found = Imported((File("run.json", {"sequence_parallel_size": "4"}),), ("deepspeed",), anyway=False)
    >>> found.setup(model="tiny", seq="8K", gpus=8).ulysses_degree
    4
    """

    files: tuple[File, ...]
    frameworks: tuple[str, ...]
    """Of each file."""
    anyway: bool
    """Whether what is not sayable is left out."""

    @cached_property
    def understood(self) -> Understood:
        """What they say, in words that frameworks share."""
        return understood(list(zip(self.files, self.frameworks, strict=True)), anyway=self.anyway)

    def rows(self, **given: Any) -> tuple[Row, ...]:
        """Return what became of each key, and what is missing; a model that is ``given`` takes the place of what files
        say of it.
        """
        wrong = {row.key: row for row in self._missing(given)}
        rows = [wrong.pop(row.key, row) for row in self.understood.rows]
        if "model" in given:
            means = "the model is given"
            rows = [row._replace(state="ignored", means=means) if row.of_model else row for row in rows]
        for fact, (field, means) in _ALONE.items():
            if degree_of(fact, self.understood, given) == 1:
                rows = [row for row in rows if not (getattr(row, field) and row.is_default)]
                rows = [row._replace(state="ignored", means=means) if getattr(row, field) else row for row in rows]
        return (*rows, *wrong.values())

    def not_sayable(self, **given: Any) -> tuple[Row, ...]:
        """Return the keys that matter and say what is not simulated, and those that are missing."""
        return tuple(row for row in self.rows(**given) if row.state == "not sayable")

    @property
    def title(self) -> str:
        """The files, and what they are of."""
        named = zip(self.files, self.frameworks, strict=True)
        return " and ".join(f"{file.path} ({frameworks()[name].title})" for file, name in named)

    def setup(self, **given: Any) -> Setup:
        """Return what to predict; fields that are ``given`` come before what files say.

        Raises InputError where a key that matters is not sayable, unless ``anyway``, and where files and what is given
        do not go together.
        """
        return self.answer(**given).setup

    def answer(self, **given: Any) -> Answer:
        """Return it with what was assumed; raises InputError as ``setup`` does."""
        wrong = self.not_sayable(**given)
        if wrong and not self.anyway:
            told = "; ".join(f"{row.key} = {row.value}: {row.means}" for row in wrong[:4])
            more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise InputError(
                f"{self.title}: not sayable: {told}{more}; longstep import shows all keys; predict without these with "
                f"`anyway`"
            )
        return Writer(self.understood, given, anyway=self.anyway).answer()

    def _missing(self, given: Mapping[str, Any]) -> Iterator[Row]:
        """Yield what no answer does without: the model, and the length."""
        facts = self.understood.facts
        if "model" not in given:
            try:
                model_of(self.understood)
            except InputError as error:
                said = facts.get("flavor") or facts.get("model") or Said("(missing)", "model")
                yield Row(said.key, said.value, "not sayable", f"{error}")
        if not {"seq", "documents"} & given.keys() and "seq" not in facts:
            yield Row("seq", "(missing)", "not sayable", "no key says how long sequences are: set `seq`")


def imported(
    *paths: str | Path, framework: str | None = None, anyway: bool = False, where: str = "`paths`"
) -> Imported:
    """Return what one or several files say of a run, such as a DeepSpeed JSON and the arguments of its trainer.

    Which framework each is of is seen by its keys, or said for all of them. Raises InputError for what is no
    configuration, and for a framework that is not known; of a path that cannot be read it says ``where`` paths are set.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
    >>> _ = path.write_text('{"zero_optimization": {"stage": 2}, "sequence_parallel_size": 4}')
    >>> imported(path).setup(model="tiny", seq="8K", gpus=8).set
    ('schedule.reduce=fp32', 'schedule.zero_stage=2', 'schedule.checkpoint=none')
    """
    if not paths:
        raise InputError(f"{where}: expected a configuration file")
    files = tuple(read(str(path), where) for path in paths)
    return Imported(files, tuple(framework_of(file, framework) for file in files), anyway)
