"""Micro-batches with documents of their own: proved and exact in pipelines and without, and what is refused of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import msgspec
import pytest

from sim.base.errors import InputError
from sim.batches.batch import batch
from sim.batches.planners.fcp import FcpOptions, fcp
from sim.batches.planners.wlb import wlb
from sim.schedule.ir.ops import Attend
from sim.schedule.ir.plan import Plans
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import NAMED
from sim.schedule.methods.gathered import gathered
from sim.schedule.methods.planned import planned
from sim.schedule.proof.check import check
from sim.words.mesh import Mesh
from sim.words.workload import PackedSequence, Workload
from tests.helpers import by_tier, make_model, slow_but
from tests.schedule.model.test_step import errors_of
from tests.schedule.proof.mutation_headers import above
from tests.schedule.proof.test_check_catches import refuses

PACKED = (
    PackedSequence(documents=(10, 14)),
    PackedSequence(documents=(32,)),
    PackedSequence(documents=(5, 8, 11), padding=8),
    PackedSequence(documents=(10, 14)),
)
"""Three lengths in four micro-batches, of which two are alike."""


def unlike(*sequences: PackedSequence, **fields: Any) -> Workload:
    some = sequences or PACKED
    given: dict[str, Any] = {"model": make_model(4, 2, head_dim=4), "dtype": "fp64", "scope": "step", "layers": 4}
    return Workload(**given | {"seq": max(map(seq, some)), "batch": len(some), "sequences": some} | fields)


def seq(one: PackedSequence) -> int:
    return one.seq


def built(name: str, mesh: Mesh, workload: Workload, **options: Any) -> Schedule:
    entry = NAMED[name]
    chosen = dataclasses.replace(entry.options, micro_batches=workload.batch, **options)
    return entry.schedule(workload, mesh, chosen)


CELLS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    "one device": ("single", Mesh(), {}),
    "1F1B": ("single", Mesh(pp=2), {"zero_stage": 0}),
    "rings": ("zigzag", Mesh(ring=2, pp=2), {}),
    "replicas, zero bubble": ("ring", Mesh(ring=2, pp=2, dp=2), {"pipeline_schedule": "zb-h1"}),
    "a V of shared heads": ("ulysses", Mesh(ulysses=2, pp=2), {"pipeline_schedule": "zb-v"}),
    "interleaved": ("allgather", Mesh(ring=2, pp=2), {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
    "shares of weights": ("zigzag", Mesh(ring=2, tp=2, pp=2), {"pipeline_schedule": "zb-h1", "checkpoint": "none"}),
    "no pipeline": ("usp", Mesh(ring=2, ulysses=2), {"loss": "chunked", "mlp": "tiled"}),
    "rings of rings, on the host": ("double-ring", Mesh(ring=2, pp=2), {"activations": "host"}),
    "replicas with shards": ("ulysses", Mesh(ulysses=2, dp=2), {"shards": "replica"}),
}


@pytest.mark.parametrize(
    "cell", by_tier({"1F1B", "rings"}, {"one device", "a V of shared heads", "replicas with shards"}, CELLS)
)
def test_losses_and_updates_are_those_of_one_process(cell: str) -> None:
    """The loss is the mean over the labels of all micro-batches, whatever their lengths."""
    name, mesh, options = CELLS[cell]
    checked = check(built(name, mesh, unlike(), **options))
    assert "loss 4" in errors_of(checked)


@pytest.mark.sweep
@pytest.mark.parametrize("fields", [{"kinds": "window"}, {"tied": True}, {"mask": "full"}])
def test_of_other_models_and_masks(fields: dict[str, Any]) -> None:
    model = make_model(4, 2, head_dim=4)
    if "kinds" in fields:
        model = msgspec.convert(msgspec.to_builtins(model) | {"kinds": [{"window": 6}, {}]}, type(model))
    if "tied" in fields:
        model = msgspec.structs.replace(model, tied_embeddings=True)
    mask = fields.get("mask", "causal")
    some = [msgspec.structs.replace(one, padding=0) for one in PACKED]
    workload = unlike(*some, model=model, mask=mask)
    errors_of(check(built("ring", Mesh(ring=2, pp=2), workload)))


PLANNED: dict[str, Any] = {"over gathered keys": (gathered, wlb), "by messages of blocks": (planned, fcp)}


@pytest.mark.sweep
@pytest.mark.parametrize("cell", slow_but({"by messages of blocks"}, PLANNED))
def test_each_has_a_plan_of_its_own(cell: str) -> None:
    """WLB-LLM's shards per document, whose ranks have other tokens in each micro-batch; and blocks."""
    play, planner = PLANNED[cell]
    some = [PackedSequence(documents=(10, 14)), PackedSequence(documents=(32,)), PackedSequence(documents=(4, 16))]
    more = {"sharding": "document"} if planner is wlb else {"options": FcpOptions(block_size=4)}
    plans: Plans = {one.documents: planner(batch(one.documents), 2, **more).plan for one in some}
    workload, mesh = unlike(*some), Mesh(ring=2, pp=2)
    built_of = play(plans, "mine")
    options = dataclasses.replace(built_of.func.__defaults__[0], micro_batches=3)
    errors_of(check(built_of(workload, mesh, options)))
    del plans[(32,)]
    with pytest.raises(InputError, match=r"no plan for documents of 32 tokens: plan those of every micro-batch"):
        built_of(workload, mesh, options)


def test_each_attends_to_its_own_documents() -> None:
    """Kernels of a micro-batch have its FLOPs: pairs of each document by hand."""
    schedule = built("single", Mesh(), unlike(layers=1), checkpoint="none")
    found = [op for op in schedule.program(0).ops if isinstance(op, Attend)]
    assert [op.q.shape[1] for op in found] == [24, 32, 32, 24]
    assert Counter(len(op.documents or ()) for op in found) == {2: 2, 0: 1, 3: 1}
    pairs = 2 * (55 + 105) + 528 + 15 + 36 + 19 * 20 // 2  # padding belongs to the last document
    claims = schedule.header.claims
    assert claims is not None
    assert claims.attention_flops == pairs * 4 * 4 * (4 + 10)


def test_alike_ones_are_written_as_those_that_share_their_documents() -> None:
    shared = msgspec.structs.replace(
        unlike(PACKED[0], PACKED[0]), sequences=msgspec.UNSET, documents=PACKED[0].documents
    )
    one, other = (built("zigzag", Mesh(ring=2, pp=2), work) for work in (unlike(PACKED[0], PACKED[0]), shared))
    assert [program.to_json() for program in one.programs] == [program.to_json() for program in other.programs]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["ulysses", "upipe"])
def test_ranks_that_do_the_same_are_written_with_positions_of_their_own(name: str) -> None:
    """Where all micro-batches have the same documents, positions of which begin anew on the second rank."""
    errors_of(check(built(name, Mesh(ulysses=2), unlike(PACKED[0], PACKED[0]))))


def test_documents_of_another_micro_batch_are_found() -> None:
    schedule = built("single", Mesh(pp=2), unlike())
    for swapped in ((1, 0, 2, 3), (0, 2, 1, 3)):
        sequences = tuple(PACKED[number] for number in swapped)
        header = msgspec.structs.replace(
            schedule.header, workload=msgspec.structs.replace(schedule.header.workload, sequences=sequences)
        )
        refuses(above(schedule, header), "not what the mask|says that it holds|is rotated by|cells of|keeps")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scope": "layer"}, "are of training steps"),
        ({"batch": 3}, "4 sequences of up to 32 tokens: expected the 3 of the `batch`"),
        ({"seq": 24}, "4 sequences of up to 32 tokens"),
        ({"documents": (32,)}, "have documents and padding of their own"),
        ({"padding": 2}, "have documents and padding of their own"),
        ({"attention": "linear"}, "with softmax attention"),
        (
            {"sequences": (*PACKED[:3], PackedSequence(documents=(3, 0)))},
            r"\(3, 0\) of micro-batch 3: expected 1 token",
        ),
    ],
)
def test_what_is_no_workload_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        unlike(**change)


def test_schedules_and_options_that_do_not_take_them_say_so() -> None:
    with pytest.raises(InputError, match=r"'fpdt' does not play `documents` of each micro-batch yet: choose another"):
        built("fpdt", Mesh(ulysses=2), unlike())
    entry = NAMED["single"]
    with pytest.raises(InputError, match=r"micro_batches=2: 4 sequences with `documents` of their own .* set it to 4"):
        entry.schedule(unlike(), Mesh(), dataclasses.replace(entry.options, micro_batches=2))
