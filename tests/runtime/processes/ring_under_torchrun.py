"""A command for torchrun: sessions of so many ranks in turn, then one of two that steps until it is ended.

The word ``survive`` among the numbers is a session of two that steps until it is ended, whose end is not the command's.
Ranks load this file too, and so it loads no more than they need.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sim.base.errors import RankError

if TYPE_CHECKING:
    from runtime.processes.launch import Session
    from runtime.processes.rank import RankContext
    from runtime.processes.torchrun import Workers
    from runtime.run import ScheduleRun


def process_and_worker(context: RankContext) -> tuple[int, int]:
    """Return this process, and that which has started the server that has forked it."""
    server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2]
    return os.getpid(), int(server.split()[1])


def rings(workers: Workers) -> None:
    from runtime.processes.launch import Session

    for word in sys.argv[1:]:
        if word == "survive":
            try:
                step_on(workers)
            except RankError as error:
                say(str(error))
        else:
            with Session(int(word), timeout_s=30, workers=workers) as session:
                ring(session, seq=32).step()
    step_on(workers)


def step_on(workers: Workers) -> None:
    """Say which process rank 1 is; then step."""
    from runtime.processes.launch import Session

    with Session(2, timeout_s=30, workers=workers) as session:
        run = ring(session, seq=8192)
        _, (process, worker) = session.call(process_and_worker)
        say(f"rank 1 is {process} of {worker}")
        while True:
            run.step()


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def ring(session: Session, seq: int) -> ScheduleRun:
    from runtime.run import ScheduleRun
    from sim.words.workload import Workload
    from tests.helpers import make_checked, make_model

    workload = Workload(model=make_model(8, 4, head_dim=64), seq=seq)
    return ScheduleRun(session, make_checked("ring", workload, session.ranks))


def main() -> None:
    from experiments.verbs.cli import guarded
    from runtime.processes.torchrun import under_torchrun

    guarded(lambda: under_torchrun(rings))
