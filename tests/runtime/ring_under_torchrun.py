"""A command for torchrun: sessions of so many ranks in turn, then one of two that steps until it is ended."""

from __future__ import annotations

import os
import sys

from experiments.cli import guarded
from runtime.launch import Session
from runtime.rank import RankContext
from runtime.run import ScheduleRun
from runtime.torchrun import Workers, under_torchrun
from sim.workload import Workload
from tests.helpers import make_checked, make_model


def process_and_parent(context: RankContext) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def rings(workers: Workers) -> None:
    for ranks in map(int, sys.argv[1:]):
        with Session(ranks, timeout_s=30, workers=workers) as session:
            ring(session, seq=32).step()
    with Session(2, timeout_s=30, workers=workers) as session:
        run = ring(session, seq=8192)
        run.step()
        _, (process, parent) = session.call(process_and_parent)
        sys.stdout.write(f"rank 1 is {process} of {parent}\n")
        sys.stdout.flush()
        while True:
            run.step()


def ring(session: Session, seq: int) -> ScheduleRun:
    workload = Workload(model=make_model(8, 4, head_dim=64), seq=seq)
    return ScheduleRun(session, make_checked("ring", workload, session.ranks))


if __name__ == "__main__":
    guarded(lambda: under_torchrun(rings))
