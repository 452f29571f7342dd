"""Every error that Longstep raises on purpose.

    LongstepError
    ├── InputError        (also ValueError)    a value that the user gave cannot be used
    │   ├── JournalError                       a journal that a sweep cannot go on with
    │   ├── LengthError                        a sequence length that a layout does not divide
    │   ├── TooLargeError                      what takes longer, or more memory, than is spent without asking
    │   └── ScheduleError                      a schedule breaks a rule that ``check`` proves
    └── RankError         (also RuntimeError)  ranks of an executed schedule died, hung, failed or erred

A message is one line: the bad value, what is allowed, and where to change it. The field to change stands in
backquotes, as the library names it (``set `ring_degree` ``); the command line writes its flag there. Broken invariants
of Longstep itself are ``assert``; a model that does not fit into memory is a result, not an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class LongstepError(Exception):
    """Base of all errors that Longstep raises on purpose.

    >>> issubclass(InputError, LongstepError) and issubclass(RankError, LongstepError)
    True
    """


class InputError(LongstepError, ValueError):
    """A value that the user gave cannot be used.

    >>> error = InputError("`nodes` 0: expected a whole number of 1 or more")
    >>> error.fields
    ('nodes',)
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of ``Setup``, or arguments, that the message names: the one with the bad value is among them."""
        return tuple(dict.fromkeys(re.findall(r"`([a-z_]+)`", str(self))))


class LengthError(InputError):
    """A sequence length that a layout does not divide; ``above`` is the next longer one that it does."""

    def __init__(self, seq: int, multiple: int) -> None:
        below, self.above = seq // multiple * multiple, -(-seq // multiple) * multiple
        nearest = f"{below} or {self.above}" if below else f"{self.above}"
        super().__init__(
            f"sequence length {seq} is no multiple of {multiple}: the nearest are {nearest}; set `seq`, or (under a "
            f"causal mask) `pad` to fill up with masked tokens"
        )
        self.seq, self.multiple = seq, multiple

    def __reduce__(self) -> tuple[type[LengthError], tuple[int, int]]:
        return type(self), (self.seq, self.multiple)  # worker processes send it to their parent


class JournalError(InputError):
    """A sweep cannot go on with a journal: it is damaged, or of another sweep or version. It is left as it is."""


class TooLargeError(InputError):
    """What takes longer, or more memory, than is spent without asking: ``yes`` goes on (``sim.setup.effort``)."""


class ScheduleError(InputError):
    """A schedule breaks a rule that ``check`` proves; ``grid`` shows where the ranks stood."""

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class RankError(LongstepError, RuntimeError):
    """Ranks of an executed schedule died, hung or raised, with rank and op named; or computed something wrong."""


def unknown(what: str, value: object, allowed: Iterable[object], where: str) -> InputError:
    """Return the error for a name that is none of ``allowed``; ``where`` says how to change it."""
    return InputError(f"{none_of(what, value, allowed)}; set it with {where}")


def none_of(what: str, value: object, allowed: Iterable[object]) -> str:
    """Return that a name is none of ``allowed``, and which of them are near: first what is a part of it, then what it
    is a part of.

    >>> none_of("cluster", "h200", ["hgx-h200", "h800"])
    "unknown cluster 'h200' (did you mean 'hgx-h200'?): allowed are hgx-h200, h800"
    """
    names, typed = [str(name) for name in allowed], str(value).lower()
    near = [name for name in names if len(name) > 2 and name.lower() in typed]
    near += [name for name in names if typed in name.lower() and name not in near] if len(typed) > 2 else []
    near = near[:3] or difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return f"unknown {what} {str(value)!r}{hint}: allowed are {', '.join(names)}"
