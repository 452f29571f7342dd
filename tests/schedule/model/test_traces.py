"""Stages call what another stage has written: with its own peers, and op by op what they would write themselves."""

from __future__ import annotations

import pytest

from sim.schedule.ir.ops import Exchange
from sim.schedule.write.traces import Shape, Traced, Traces
from tests.helpers import slow_but
from tests.schedule.model.test_pipelines import CASES, QUICK, TESTED


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({*QUICK, *TESTED}, CASES))
def test_a_stage_does_what_it_writes_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = CASES[name].build().to_json()
    monkeypatch.setattr(Traces, "of", lambda *_: None)
    assert CASES[name].build().to_json() == shared


def test_a_layer_is_written_for_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stages with rings of two: once for each rank of a ring, and the others meet their own peers."""
    writers: list[int] = []
    add = Traces.add

    def noted(self: Traces, shape: Shape, rank: int, traced: Traced) -> None:
        if shape[0] == "forward":
            writers.append(rank)
        add(self, shape, rank, traced)

    monkeypatch.setattr(Traces, "add", noted)
    schedule = CASES["1F1B of rings, optimiser sharded"].build()
    mesh, met = schedule.header.mesh, set[tuple[int, int]]()
    for program in schedule.programs:
        ops = [op for call in program.calls for op in call.fragment.ops if isinstance(op, Exchange)]
        met |= {(program.rank, some.peer) for op in ops for some in (*op.sends, *op.recvs)}
    assert len(writers) == mesh.size // mesh.pp
    for rank, peer in met:
        same_stage = mesh.place(rank)["pp"] == mesh.place(peer)["pp"]
        assert same_stage != (mesh.place(rank)["ring"] == mesh.place(peer)["ring"])
