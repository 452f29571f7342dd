"""What communication ops are on gloo: messages whose receives are posted before its sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from runtime.execution import groups
from runtime.processes.launch import Session
from runtime.processes.rank import RankContext

pytestmark = pytest.mark.gloo
RANKS = 3


class Found(NamedTuple):
    """What a rank received in an all-to-all, and the calls that it made."""

    received: list[list[float]]
    calls: list[str]


def all_to_all(context: RankContext) -> Found:
    """Send part j of rank i, of i + j numbers, to rank j."""
    given = [torch.full((context.rank + other,), float(10 * context.rank + other)) for other in range(RANKS)]
    out = [torch.empty(context.rank + other) for other in range(RANKS)]
    calls: list[str] = []
    send_all = dist.batch_isend_irecv

    def recorded(ops: list[Any]) -> list[Any]:
        calls.extend(op.op.__name__ for op in ops)
        return send_all(ops)

    dist.batch_isend_irecv = recorded
    try:
        for work in groups._all_to_all(out, given, dist.group.WORLD):
            work.wait()
    finally:
        dist.batch_isend_irecv = send_all
    return Found([part.tolist() for part in out], calls)


def test_receives_of_an_all_to_all_are_posted_before_its_sends() -> None:
    """Behind a send, gloo's note that a peer may begin would wait for all of it."""
    with Session(RANKS, timeout_s=60) as session:
        found = session.call(all_to_all)
    for rank, one in enumerate(found):
        assert one.received == [[float(10 * other + rank)] * (other + rank) for other in range(RANKS)]
        assert one.calls == ["irecv"] * 2 + ["isend"] * 2
