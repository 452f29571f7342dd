"""Pipelines of training steps: timetables by hand, proved with claims and exact, and what is wrong in them is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import terms_in_use, walk
from sim.base.errors import InputError
from sim.schedule.ir.ops import COMPUTE, Exchange, HostSync, Op, SquareSum
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.methods.catalog import NAMED, SCHEDULES
from sim.schedule.model.pipeline.timetables import (
    PIPELINES,
    Pipeline,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from sim.schedule.model.scope import trained, updated
from sim.schedule.model.step import Item, Timetable
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import by_tier, make_model
from tests.schedule.proof.test_check_catches import refuses


class Case(NamedTuple):
    """A pipeline of four micro-batches, unless it says another number; without rings the schedule is single."""

    pipeline: str
    layers: str
    """Of each chunk."""
    mesh: Mesh
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to
    schedule: str = "ring"
    model: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def build(self, micros: int = 4) -> Schedule:
        split = [int(number) for number in self.layers.split(",")]
        given: dict[str, Any] = {"zero_stage": 0, "checkpoint": "none", "micro_batches": micros}
        given |= {"pipeline_schedule": self.pipeline, "pipeline_layers": self.layers}
        given |= {} if PIPELINES[self.pipeline].chunks else {"pipeline_chunks": len(split) // self.mesh.pp}
        given |= self.options
        model = msgspec.structs.replace(make_model(4, 2, head_dim=4), ffn_dim=12, vocab_size=40, **self.model)
        workload = Workload(model=model, seq=16, batch=micros, dtype="fp64", scope="step", layers=sum(split))
        entry = NAMED[self.schedule if self.mesh.size > self.mesh.pp else "single"]
        return entry.schedule(workload, self.mesh, dataclasses.replace(entry.options, **given))


TWO, RINGS, THREE = Mesh(pp=2), Mesh(pp=2, ring=2), Mesh(pp=3)
REPLICAS, SHARES = Mesh(pp=2, dp=2, ring=2), Mesh(pp=2, tp=2)
CASES = {
    "1F1B": Case("1f1b", "2,1", TWO),
    "1F1B of three stages": Case("1f1b", "1,1,1", THREE),
    "1F1B, the head alone": Case("1f1b", "1,0", TWO),
    "1F1B, a stage without weights": Case("1f1b", "2,0,0", Mesh(pp=3, dp=2), {"zero_stage": 1, "gather": "all"}),
    "GPipe": Case("gpipe", "1,2", TWO),
    "zero bubble": Case("zb-h1", "2,1", TWO),
    "zero bubble of three stages": Case("zb-h1", "1,1,1", THREE, {"sync": "last"}),
    "zero bubble of rings, gradients sharded": Case("zb-h1", "2,1", RINGS, {"zero_stage": 2}),
    "zero bubble of rings, weights sharded": Case("zb-h1", "2,1", RINGS, {"zero_stage": 3}),
    "zero bubble, more ahead": Case("zb-h2", "1,1,1", THREE),
    "zero bubble, interleaved": Case("interleaved-zb", "1,1,1,1", TWO),
    "zero bubble as a V": Case("zb-v", "2,1,1,1", TWO),
    "zero bubble as a V of three stages": Case("zb-v", "1,1,1,1,1,1", THREE),
    "zero bubble as a V of rings, weights sharded": Case("zb-v", "1,1,1,1", RINGS, {"zero_stage": 3}),
    "parts handed on": Case("1f1b", "1,1", SHARES, {"tp_sequence": False, "tp_hands": "parts"}),
    "dual pipe": Case("dualpipe", "1,2", TWO),
    "dual pipe of rings, weights sharded": Case("dualpipe", "1,1", RINGS, {"zero_stage": 3}),
    "dual pipe of rings, gradients sharded": Case("dualpipe", "1,2", RINGS, {"zero_stage": 2}),
    "dual pipe, optimiser sharded": Case("dualpipe", "2,1", TWO, {"zero_stage": 1}),
    "dual pipe, sums to all": Case("dualpipe", "1,1", RINGS, {"zero_stage": 1, "reduce_to": "all"}),
    "dual pipe, one sum": Case("dualpipe", "2,2", TWO, {"zero_stage": 2, "sync": "last", "activations": "host"}),
    "dual pipe of shares": Case("dualpipe", "1,1", SHARES),
    "dual pipe of replicas, sharded within": Case("dualpipe", "1,1", REPLICAS, {"zero_stage": 3, "shards": "replica"}),
    "dual pipe as a V": Case("dualpipe-v", "1,1,1,1", TWO),
    "dual pipe as a V, activations on the host": Case("dualpipe-v", "1,2,1,2", TWO, {"activations": "host"}),
    "interleaved": Case("interleaved", "2,1,1,1", TWO),
    "1F1B, hosts wait for messages": Case("1f1b", "1,1,1", THREE, {"host_waits": "messages"}),
    "interleaved, hosts wait for messages": Case("interleaved", "1,1,1,1", TWO, {"host_waits": "messages"}),
    "1F1B of shares, norms summed once": Case("1f1b", "1,1", Mesh(pp=2, tp=2, ring=2), {"zero_stage": 1}),
    "both ends one weight, shares": Case("1f1b", "1,1", SHARES, {"zero_stage": 1}, model={"tied_embeddings": True}),
    "zero bubble, interleaved, received as it comes": Case("interleaved-zb", "1,1,1,1,1,1", TWO),
    "breadth first": Case("looped-bfs", "1,1,2,1", TWO),
    "breadth first of rings, weights sharded": Case("looped-bfs", "1,1,1,1", RINGS, {"zero_stage": 3}),
    "interleaved of three stages": Case("interleaved", "1,1,1,1,1,1", THREE),
    "1F1B of rings, nothing sharded": Case("1f1b", "2,1", RINGS),
    "1F1B of rings, optimiser sharded": Case("1f1b", "2,1", RINGS, {"zero_stage": 1}),
    "1F1B of rings, gradients sharded": Case("1f1b", "2,1", RINGS, {"zero_stage": 2}),
    "1F1B of rings, weights sharded": Case("1f1b", "2,1", RINGS, {"zero_stage": 3}),
    "1F1B, weights sharded, the head alone": Case("1f1b", "2,0", RINGS, {"zero_stage": 3}),
    "1F1B of rings, one sum": Case("1f1b", "1,1", RINGS, {"zero_stage": 2, "sync": "last"}),
    "interleaved rings, one sum": Case("interleaved", "1,1,1,1", RINGS, {"zero_stage": 2, "sync": "last"}),
    "interleaved rings, weights sharded": Case("interleaved", "1,1,1,1", RINGS, {"zero_stage": 3, "prefetch": 2}),
    "in place": Case("1f1b", "1,1", TWO, {"sync": "last", "accumulate": "in-place", "loss": "chunked"}),
    "activations on the host": Case("1f1b", "1,1", TWO, {"activations": "save-on-cpu"}),
    "activations on the host, ahead": Case("1f1b", "3,2", TWO, {"activations": "host"}),
    "activations on the host, interleaved": Case("interleaved", "2,1,2,2", TWO, {"activations": "host"}),
    "optimiser on the host": Case("1f1b", "1,1", RINGS, {"zero_stage": 1, "optimiser": "host"}),
    "weights on the host": Case("1f1b", "1,1", RINGS, {"zero_stage": 3, "optimiser": "host", "weights": "host"}),
    "computed again": Case("gpipe", "2,1", RINGS, {"zero_stage": 3, "checkpoint": "full"}),
    "replicas": Case("1f1b", "1,1", REPLICAS, {"zero_stage": 3}),
    "replicas, sharded within": Case("zb-h1", "1,1", REPLICAS, {"zero_stage": 3, "shards": "replica"}),
    "replicas, nothing sharded": Case("1f1b", "1,1", REPLICAS),
}
TIED, ADAPTERS = {"tied_embeddings": True}, {"lora_rank": 2}
CASES |= {
    "both ends one weight": Case("1f1b", "1,1", TWO, model=TIED),
    "both ends one weight, three stages": Case("zb-h1", "1,1,1", THREE, {"loss": "chunked"}, model=TIED),
    "both ends one weight, optimiser sharded": Case("1f1b", "1,1", RINGS, {"zero_stage": 1}, model=TIED),
    "both ends one weight, sums to all": Case("1f1b", "1,1", RINGS, {"zero_stage": 1, "reduce_to": "all"}, model=TIED),
    "both ends one weight, one sum": Case("1f1b", "1,1", REPLICAS, {"zero_stage": 2, "sync": "last"}, model=TIED),
    "both ends one weight, sharded": Case("interleaved", "1,1,1,1", RINGS, {"zero_stage": 3}, model=TIED),
    "both ends one weight, on the host": Case("1f1b", "1,1", RINGS, {"zero_stage": 1, "optimiser": "host"}, model=TIED),
    "both ends one weight, in place": Case(
        "gpipe", "1,1", TWO, {"sync": "last", "accumulate": "in-place", "reduce": "fp32"}, model=TIED
    ),
    "both ends one weight, within replicas": Case(
        "1f1b", "1,1", REPLICAS, {"zero_stage": 3, "shards": "replica"}, model=TIED
    ),
    "adapters": Case("1f1b", "2,1", RINGS, {"zero_stage": 3}, model=ADAPTERS),
    "adapters, both ends one weight": Case("1f1b", "2,1", RINGS, {"zero_stage": 1}, model=ADAPTERS | TIED),
}
CASES |= {
    f"around {name}": Case("1f1b", "1,1", RINGS if "ring" in NAMED[name].degrees else Mesh(pp=2, ulysses=2),
                           {"zero_stage": 3, **({"checkpoint": "full"} if name in {"upipe", "fpdt"} else {})}, name)
    for name in SCHEDULES if name not in {"single", "ring"}
}  # fmt: skip
CASES["around usp, of both"] = Case("interleaved", "1,1,1,1", Mesh(pp=2, ulysses=2, ring=2), {"zero_stage": 2}, "usp")
QUICK = ("1F1B", "1F1B of rings, optimiser sharded", "zero bubble", "1F1B of rings, weights sharded")
QUICK += ("both ends one weight, optimiser sharded", "dual pipe")
TESTED = {
    "1F1B, hosts wait for messages",
    "GPipe",
    "zero bubble, interleaved",
    "zero bubble as a V",
    "parts handed on",
    "dual pipe, one sum",
    "dual pipe of shares",
    "dual pipe as a V",
    "interleaved",
    "breadth first",
    "1F1B, weights sharded, the head alone",
    "interleaved rings, weights sharded",
    "activations on the host, interleaved",
    "weights on the host",
    "computed again",
    "replicas, sharded within",
    "both ends one weight, three stages",
    "both ends one weight, sums to all",
    "both ends one weight, shares",
    "around upipe",
}
"""Each order of passes, and what stages may have beside it, once."""


@pytest.mark.parametrize("name", by_tier(QUICK, TESTED, CASES))
def test_pipelines_are_proved_and_exact(name: str) -> None:
    """Losses, weights and moments equal those of one process."""
    checked = check(CASES[name].build())
    errors = output_errors(checked, execute_virtual(checked, torch.device("cpu"), 1))
    states = [updated(state).name for unit in trained(checked.schedule.header.workload) for state in unit.states]
    assert {name.rstrip(" 0123456789") for name in errors} >= {*states}
    assert max(errors.values()) <= BOUNDS["fp64"]


def spelled(items: list[Item]) -> str:
    return " ".join(f"{item.kind[0]}{item.micro}.{item.chunk}" for item in items)


def test_timetables_by_hand() -> None:
    assert spelled(gpipe(1, 2, 3, 1)) == "F0.1 F1.1 F2.1 B2.1 B1.1 B0.1"
    assert spelled(one_f_one_b(0, 2, 3, 1)) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert spelled(one_f_one_b(1, 2, 3, 1)) == "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1"
    assert spelled(one_f_one_b(0, 4, 2, 1)) == "F0.0 F1.0 B0.0 B1.0"
    assert spelled(zero_bubble(0, 2, 3, 1)) == "F0.0 F1.0 B0.0 W0.0 F2.0 B1.0 W1.0 B2.0 W2.0"
    assert spelled(zero_bubble(1, 2, 3, 1)) == "F0.1 B0.1 F1.1 B1.1 W0.1 F2.1 B2.1 W1.1 W2.1"
    assert spelled(interleaved(1, 2, 2, 2)) == "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1"


@pytest.mark.parametrize("timetable", [gpipe, one_f_one_b, interleaved])
def test_each_micro_batch_passes_each_chunk_once(timetable: Timetable) -> None:
    chunks = 2 if timetable is interleaved else 1
    for stages in (1, 2, 3):
        for stage in range(stages):
            items = timetable(stage, stages, 6, chunks)
            assert len(set(items)) == len(items) == 2 * 6 * chunks
            for item in items:
                assert item.chunk % stages == stage
                assert items.index(item._replace(kind="F")) <= items.index(item)


@pytest.mark.sweep
def test_activations_of_how_many_micro_batches_are_held() -> None:
    """The first of two stages holds those of two with 1F1B, and of all with GPipe."""

    def peaks(pipeline: str) -> list[int]:
        """Return those of 4, 5 and 6 micro-batches, without token ids, which come from outside."""
        found = []
        for micros in (4, 5, 6):
            checked = check(Case(pipeline, "1,1", TWO).build(micros))
            found.append(walk(checked.schedule.program(0), checked.dependencies[0]).peak_bytes - micros * 16 * 8)
        return found

    same, growing = peaks("1f1b"), peaks("gpipe")
    assert same[0] == same[1] == same[2] < growing[0]
    assert growing[2] - growing[1] == growing[1] - growing[0] > 0


def test_copies_of_both_stages_are_held() -> None:
    """Each of two ranks has all weights and moments; where they are sharded, over both, half of the moments."""

    def held(pipeline: str, stage: int) -> list[dict[str, int]]:
        """Return by rank what a step begins with."""
        checked = check(Case(pipeline, "1,1", TWO, {"zero_stage": stage}).build())
        walks = zip(checked.schedule.programs, checked.dependencies, strict=True)
        return [{name: of[0] for name, of in terms_in_use(*walked).items()} for walked in walks]

    for name in ("parameters", "optimiser"):
        both = sum(one[name] for one in held("1f1b", 0))
        assert [one[name] for one in held("dualpipe", 0)] == [both, both]
    moments = [one["optimiser"] for one in held("dualpipe", 0)]
    assert [2 * one["optimiser"] for one in held("dualpipe", 1)] == moments


def test_parts_that_are_handed_on_go_between_stages_once() -> None:
    """Where each of two members hands on all tokens, they go twice."""

    def sent(hands: str) -> int:
        schedule = Case("1f1b", "1,1", SHARES, {"tp_sequence": False, "tp_hands": hands}).build()
        found = [(program, op) for program in schedule.programs for op in program.ops if isinstance(op, Exchange)]
        return sum(program.nbytes(view) for program, op in found for _, view in op.sends)

    assert sent("all") == 2 * sent("parts") == 2 * 2 * 4 * 16 * 16 * 8


def test_the_host_waits_for_what_stages_hand_on() -> None:
    """It waits for what it sends, makes two headers forward and one back, and reads as many of what it receives."""
    program = CASES["1F1B, hosts wait for messages"].build(3).program(1)
    ops = [op for op in program.ops if isinstance(op, Exchange | HostSync) and op.label != "wait for the micro-batch"]
    found = {"send": set[int](), "receive": set[int]()}
    for at, op in enumerate(ops):
        if isinstance(op, Exchange):
            waits = ops[at - 2 : at] if op.sends else ops[at + 1 : at + 3]
            stream = COMPUTE if op.sends else op.communicator
            first, second = (one for one in waits if isinstance(one, HostSync))
            assert first.streams == second.streams == (stream,)
            assert first.calls is msgspec.UNSET
            assert isinstance(second.calls, int)
            found["send" if op.sends else "receive"].add(second.calls)
    assert len(ops) == 3 * 3 * 4
    assert found == {"send": {8, 16}, "receive": {20, 40}}
    assert not any(isinstance(op, HostSync) for op in CASES["1F1B of three stages"].build(3).program(1).ops)


def changed(change: Callable[[int, Op], Op | None], name: str = "1F1B") -> Schedule:
    """Return a 1F1B of two stages with other ops, or without some."""
    schedule = CASES[name].build()

    def program(rank: int) -> Program:
        own = schedule.program(rank)
        ops = [change(rank, op) for op in own.ops]
        return own.replace(ops=tuple([op for op in ops if op is not None]))

    return Schedule(schedule.header, program)


def test_a_stage_that_takes_micro_batches_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(stage: int, stages: int, micros: int, chunks: int) -> list[Item]:
        items = one_f_one_b(stage, stages, micros, chunks)
        return [item._replace(micro=(1, 0, *range(2, micros))[item.micro]) for item in items] if stage else items

    monkeypatch.setitem(PIPELINES, "crossed", Pipeline(crossed, "none"))
    refuses(Case("crossed", "2,1", TWO).build(), "with other tokens")


def test_a_norm_of_one_stage() -> None:
    refuses(changed(lambda _, op: None if op.label == "norm of gradients" else op), "updates by a norm that lacks")


@pytest.mark.parametrize(
    ("label", "said"),
    [("reduce root of both ends", "squares droot .*, which is no flat gradient or not complete yet"),
     ("no dnorm", "pack gradients of root.* of buffer 'dnorm 0' before all of it is written")],
)  # fmt: skip
def test_gradients_of_one_end_alone(label: str, said: str) -> None:
    """Each stage would update by what it has of the weight that is at both ends."""
    refuses(changed(lambda _, op: None if op.label == label else op, "both ends one weight"), said)


def test_one_stage_squares_what_is_at_both_ends() -> None:
    schedule = CASES["both ends one weight"].build()
    labels = [[op.label for op in schedule.program(rank).ops if isinstance(op, SquareSum)] for rank in (0, 1)]
    assert labels == [["square weights 0", "square root 0"], ["square weights 1"]]


def test_a_message_that_is_lost() -> None:
    def lost(rank: int, op: Op) -> Op | None:
        return None if rank and isinstance(op, Exchange) and op.label == "send dx" else op

    refuses(changed(lost), "rank 1 sends 0 times to rank 0, which receives 4 times")


def test_stages_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one for the gradient of a micro-batch, the second one for the micro-batches behind it."""

    def stuck(stage: int, _stages: int, micros: int, _chunks: int) -> list[Item]:
        in_turn = [item._replace(chunk=stage) for item in one_f_one_b(1, 2, micros, 1)]
        return sorted(in_turn, key=lambda item: item.kind != "F") if stage else in_turn

    monkeypatch.setitem(PIPELINES, "stuck", Pipeline(stuck, "none"))
    refuses(Case("stuck", "2,1", TWO).build(), "deadlock: rank 0 .* 'receive dx' on 'back 0'.; rank 1 .* 'receive x'")


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        (TWO, {"pipeline_schedule": "dual"}, "unknown pipeline 'dual'.*: allowed are 1f1b, gpipe, .*, FILE.csv"),
        (TWO, {"pipeline_layers": "2,2"}, "pipeline_layers=2,2: expected 2 numbers with commas that add up to 3"),
        (TWO, {"pipeline_layers": "a"}, "pipeline_layers=a: expected 2 numbers"),
        (TWO, {"pipeline_layers": "4,-1"}, "pipeline_layers=4,-1: expected 2 numbers"),
        (TWO, {"pipeline_layers": "1*a"}, r"pipeline_layers=1\*a: expected 2 numbers"),
        (TWO, {"pipeline_layers": "1*3"}, "pipeline_layers=1,1,1: expected 2 numbers"),
        (TWO, {}, "`layers` 3 do not divide over 2 chunks .* such as 2,1"),
        (
            TWO,
            {"pipeline_chunks": 2},
            "pipeline_chunks=2: expected 1 or more, and above 1 only .* a stage: looped-bfs, interleaved, inter",
        ),
        (Mesh(), {"pipeline_layers": "3"}, "are of pipelines: leave them out, or set `pp_degree` 2 or more"),
        (SHARES, {"tp_hands": "parts"}, "tp_hands=parts: with sequence parallelism .*tp_sequence=false"),
        (
            THREE,
            {"pipeline_schedule": "dualpipe", "pipeline_layers": "1,1,1"},
            "dualpipe over 3 stages with 4 micro-batches: expected even numbers of both, .*`pp_degree` 4 and",
        ),
        (
            THREE,
            {"pipeline_schedule": "dualpipe-v", "pipeline_layers": "1,1,1,0,0,0"},
            "dualpipe-v over 3 stages takes 6 micro-batches or more, not 4: .*micro_batches=6",
        ),
    ],
)
def test_what_is_no_pipeline(mesh: Mesh, options: dict[str, Any], said: str) -> None:
    model = msgspec.structs.replace(make_model(4, 2, head_dim=4), ffn_dim=12, vocab_size=40)
    workload = Workload(model=model, seq=16, batch=4, dtype="fp64", scope="step", layers=3)
    given = dataclasses.replace(NAMED["single"].options, micro_batches=4, **options)
    with pytest.raises(InputError, match=said):
        NAMED["single"].schedule(workload, mesh, given)


def test_pipelines_are_of_training_steps() -> None:
    layer = Workload(model=make_model(4, 2), seq=16, scope="layer", layers=2)
    with pytest.raises(InputError, match="`pp_degree` 2: pipelines are of training steps; set `scope` step"):
        NAMED["single"].schedule(layer, TWO)
