"""What is proved is remembered in the user's cache, so that a schedule that is asked for again is not proved again.

    schedule ── SHA-256 of all that ``check`` looks at, and of the code that looks ──> a line of a file

A line is the key of a schedule that ``check`` accepted, whole; one that it refused has none. The file is believed line
by line: what is left of a torn or a damaged one is no key. A file that somebody else can have written is not believed,
but made anew. Processes add lines at its end; one that drops the oldest may lose what another adds meanwhile, which is
then proved again. ``LONGSTEP_PROOFS=off`` proves all anew, and writes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

import sim
from sim.base.cache import is_own, own_folder
from sim.base.errors import InputError
from sim.base.files import write_whole
from sim.schedule.derive.roles import numbered
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.stretches import Stretched
from sim.schedule.proof.check import Checked, check

_ROOMS = ("base", "native", "words", "schedule")
"""Those that a proof is made in: whatever it may import of Longstep lies in them."""
_MOST = 4096
"""Keys that are left when the oldest are dropped, which is done at twice as many."""
_OWN = 0o600

_encode = msgspec.msgpack.Encoder().encode
"""JSON would write of what is not finite that it is nothing."""


def check_once(schedule: Schedule) -> Checked:
    """Return the schedule as ``check`` does; what was proved before, by this code and on this machine, is not proved
    again. Raises ScheduleError as ``check`` does.
    """
    path = _path()
    if path is None or schedule.whole is not schedule:
        return check(schedule)
    line = b"\n%b\n" % key_of(schedule).encode()
    if line in _lines(path):
        return Checked(schedule)
    checked = check(schedule)
    _add(path, line)
    return checked


def key_of(schedule: Schedule) -> str:
    """Return the SHA-256, 64 hexadecimal digits, of all that a proof depends on: header, programs with their fragments,
    which ranks are said to do the same, and the code.
    """
    mesh, digests = schedule.header.mesh, _Digests()
    digest = hashlib.sha256(_code())
    digest.update(_encode(msgspec.structs.replace(schedule.header, claims=None)))
    digest.update(_encode(repr(schedule.header.claims)))  # FLOPs may be more than an integer of 64 bits
    digest.update(_encode([schedule.replicated, schedule.rows_later, schedule.written_as]))
    digest.update(_encode(numbered([schedule.kind(rank) for rank in range(mesh.size)])))
    for rank in mesh.at({"dp": schedule.written}):
        digest.update(digests.of_program(schedule.program(rank)))
    return digest.hexdigest()


class _Digests:
    """Digests of what programs consist of; parts that they share are encoded once."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}
        self._fragments: dict[Fragment, bytes] = {}

    def of_program(self, program: Program) -> bytes:
        """Return the digest of a program, by its calls."""
        calls = [(self._of_fragment(one.fragment), one.given, one.first, one.layer) for one in program.calls]
        return _digest([program.rank, program.begins, calls])

    def _of_fragment(self, one: Fragment) -> bytes:
        if one not in self._fragments:
            alike = self._of_fragment(one.alike) if one.alike else None
            parts = [self._of_part(part) for part in (one.given, one.own, one.ops, one.inputs, one.outputs)]
            self._fragments[one] = _digest([parts, one.buffer_layers, one.op_layers, alike, one.peers_later])
        return self._fragments[one]

    def _of_part(self, part: Sequence[object]) -> bytes:
        """Return the digest of a part of a fragment, which lives as long as this does."""
        if id(part) not in self._parts:
            self._parts[id(part)] = self._of_stretches(part) if isinstance(part, Stretched) else _digest(part)
        return self._parts[id(part)]

    def _of_stretches(self, ops: Stretched) -> bytes:
        """Return the digest of ops by what they are made of."""
        parts = [(self._of_part(bound.stretch.ops), bound.stretch.starts, *bound[1:]) for bound in ops.bounds]
        return _digest([parts, ops.which.tolist(), ops.firsts.tolist(), ops.labels])


def _digest(thing: object) -> bytes:
    return hashlib.sha256(_encode(thing)).digest()


@cache
def _code() -> bytes:
    """Return the digest of the code that proves, and of what it stands on."""
    root = Path(sim.__file__).parent
    files = sorted(path for room in _ROOMS for path in (root / room).rglob("*") if path.suffix in {".py", ".c"})
    code = [(str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).digest()) for path in files]
    return _digest([sys.version, np.__version__, msgspec.__version__, code])


def _path() -> Path | None:
    """Return the file of keys; None where there is to be none."""
    if os.environ.get("LONGSTEP_PROOFS") == "off":
        return None
    folder = own_folder("proofs")
    return folder / "proved" if folder else None


def _lines(path: Path) -> bytes:
    """Return what the file holds; nothing where another can have written it."""
    try:
        return path.read_bytes() if is_own(path) else b""
    except OSError:
        return b""


def _add(path: Path, line: bytes) -> None:
    """Add a line to the file; where it cannot be written, nothing is remembered."""
    with contextlib.suppress(OSError, InputError):
        if os.path.lexists(path) and not is_own(path):  # one that is not there yet may be another's a moment later
            path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _OWN), "wb", buffering=0) as file:
            file.write(line)
        lines = path.read_bytes().split()
        if len(lines) > 2 * _MOST:
            write_whole(path, b"".join(b"\n%b\n" % one for one in lines[-_MOST:]))
