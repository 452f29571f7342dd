"""The proof that remembers, held against the flat one: it finds the same contents, and accepts nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import msgspec
import pytest

from sim.base.errors import InputError, ScheduleError
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.fragments import Call, Fragment
from sim.schedule.ir.masks import Span
from sim.schedule.ir.ops import AdamW, AllGather, Gemm
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.ir.views import Split, View
from sim.schedule.model.block import block_of
from sim.schedule.proof import check as proof
from sim.schedule.proof.abstract import AbstractPlayer
from sim.schedule.proof.check import Checked, check
from sim.schedule.proof.contents import coalesced
from sim.schedule.proof.supersteps import Declined, Supersteps
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import Workload, load_model
from tests.helpers import OFFLOADED, VARIANTS, by_tier, make_model
from tests.schedule.ir.test_fragments import layered
from tests.schedule.proof.mutation_operators import OPERATORS

LLAMA = block_of(load_model("tiny"))


def flattened(schedule: Schedule) -> Schedule:
    """Return a schedule whose programs are one call each."""
    return Schedule(schedule.header, [program.replace() for program in schedule.programs].__getitem__)


def by_all_ops(schedule: Schedule) -> bool:
    """Return whether the flat proof, rank by rank, accepts a schedule."""
    try:
        proof._prove(Checked(schedule), together=False)
    except InputError:
        return False
    return True


def by_calls(schedule: Schedule) -> bool:
    """Return whether the proof that remembers accepts a schedule."""
    return proof._is_proved_by_calls(Checked(schedule))


def ends_as_the_flat_proof_does(schedule: Schedule) -> None:
    """Assert that every buffer ends with the same contents by both proofs."""
    checked = Checked(flattened(schedule))
    flat = AbstractPlayer(checked.schedule, checked.matching, checked.dependencies)
    flat.run()
    supersteps = Supersteps(schedule)
    supersteps.play()
    for rank, memory in enumerate(flat.memory):
        for number, held in enumerate(memory.held()):
            found = supersteps.held(rank, number)
            assert sorted(coalesced(list(found.pieces))) == sorted(coalesced(list(held.pieces)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    by_tier(
        {"ring", "usp of 2", "zigzag, offloaded"},
        {"balanced-ring", "allgather", "fpdt"},
        [*VARIANTS, *OFFLOADED],
    ),
)
def test_every_buffer_ends_with_what_the_flat_proof_leaves_there(name: str) -> None:
    schedule = layered(name, layers=5)
    ends_as_the_flat_proof_does(schedule)
    assert by_calls(schedule)


@pytest.mark.parametrize("name", by_tier({"ring"}, {"ulysses", "upipe", "zigzag, offloaded"}, [*VARIANTS, *OFFLOADED]))
def test_more_layers_are_remembered(name: str) -> None:
    played = set()
    for layers in (6, 9):
        supersteps = Supersteps(layered(name, layers=layers))
        supersteps.play()
        played.add(supersteps.num_played)
        assert supersteps.num_played < len(supersteps.all)
    assert len(played) == 1


def a_step(layers: int) -> Schedule:
    """Return a training step on a ring of two, not proved."""
    workload = Workload(model=make_model(8, 4, 4), seq=16, mask="causal", scope="step", layers=layers)
    return VARIANTS["ring"].build(workload, Mesh(ring=2))


def test_updates_of_more_layers_are_remembered() -> None:
    """However many layers there are between theirs and those of the squares that they are given."""
    played = []
    for layers in (3, 5):
        supersteps = Supersteps(a_step(layers))
        supersteps.play()
        played.append(supersteps.num_played)
    assert played[0] == played[1]


@pytest.mark.parametrize(("place", "accepted"), [(0, False), (1, True), (2, False), (3, False), (4, False)])
def test_an_update_that_is_given_what_is_of_another_layer(place: int, *, accepted: bool) -> None:
    """Its gradient, its weights and both moments are its own; the squares are those of all."""
    schedule, programs = a_step(3), list[Program]()
    for program in schedule.programs:
        calls = list(program.calls)
        one, other = [at for at, call in enumerate(calls) if call.fragment.squares and call.layer in {1, 2}]
        given = list(calls[other].given)
        given[place] = calls[one].given[place]
        calls[other] = calls[other]._replace(given=tuple(given))
        programs.append(Program.of_calls(program.rank, calls))
    assert by_calls(Schedule(schedule.header, programs.__getitem__)) == accepted


def test_squares_that_an_update_takes_for_something_else_as_well_are_counted_with_it() -> None:
    fragment = next(call.fragment for call in a_step(1).program(0).calls if call.fragment.squares)
    (update,) = fragment.ops
    assert isinstance(update, AdamW)
    twice = msgspec.structs.replace(update, gradient=update.squares)
    assert not replace(fragment, ops=(twice,)).squares


# What is wrong in one call


def rebinding(draw: Random, schedule: Schedule) -> Schedule:
    """Return a schedule with a call, on one rank or on all, that is given another buffer in place of one."""
    programs = schedule.programs
    ranks = draw.choice([[draw.randrange(len(programs))], range(len(programs))])
    state = draw.random()
    for rank in ranks:
        one, calls = Random(state), list(programs[rank].calls)
        at = one.choice([at for at, call in enumerate(calls) if call.given])
        given, buffers = list(calls[at].given), programs[rank].buffers
        place = one.randrange(len(given))
        alike = [
            number
            for number, buffer in enumerate(buffers[: calls[at].first])
            if (buffer.shape, buffer.dtype) == (buffers[given[place]].shape, buffers[given[place]].dtype)
        ]
        given[place] = one.choice(alike)
        programs[rank] = Program.of_calls(rank, [*calls[:at], calls[at]._replace(given=tuple(given)), *calls[at + 1 :]])
    return Schedule(schedule.header, programs.__getitem__)


def recut(schedule: Schedule, original: Schedule) -> Schedule:
    """Return a schedule in calls that end where those of the original do, before or after what was changed."""
    programs = [
        Program.of_calls(new.rank, _calls(new, old))
        for new, old in zip(schedule.programs, original.programs, strict=True)
    ]
    return Schedule(schedule.header, programs.__getitem__)


def _calls(new: Program, old: Program) -> Iterator[Call]:
    """Yield a call that makes all buffers, calls of all ops, and one that leaves all outputs; equal ones of one
    fragment.
    """
    yield Call(Fragment((), new.buffers, (), new.inputs, ()))
    equal = (at for at, (a, b) in enumerate(zip(new.ops, old.ops, strict=False)) if a != b)
    same = next(equal, min(len(new.ops), len(old.ops)))
    known: dict[object, Fragment] = {}
    begin = end = at = 0
    for call in old.calls:
        at += len(call.fragment.ops)
        begin, end = end, min(max(at if at <= same else at + len(new.ops) - len(old.ops), end), len(new.ops))
        views = [view for op in new.ops[begin:end] for view in (*op.reads, *op.writes)]
        given = tuple(dict.fromkeys(view.buffer for view in views))
        number = {buffer: place for place, buffer in enumerate(given)}
        ops = tuple(rebound(op, number) for op in new.ops[begin:end])
        buffers = tuple(msgspec.structs.replace(new.buffers[buffer], name="") for buffer in given)
        fragment = known.setdefault((ops, buffers), Fragment(buffers, (), ops, (), ()))
        yield Call(fragment, given, len(new.buffers))
    given = tuple(dict.fromkeys(port.view.buffer for port in new.outputs))
    outputs = tuple(port.rebound({buffer: place for place, buffer in enumerate(given)}) for port in new.outputs)
    yield Call(Fragment(tuple(new.buffers[buffer] for buffer in given), (), (), (), outputs), given, len(new.buffers))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_is_given_another_buffer(seed: int) -> None:
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    for name in ("ring", "usp of 2", "zigzag, offloaded"):
        schedule = layered(name, layers=4)
        for _ in range(20):
            changed = rebinding(draw, schedule)
            if changed.programs != schedule.programs:
                verdicts[by_calls(changed), by_all_ops(flattened(changed))] += 1
    assert not verdicts[True, False]
    assert verdicts[False, False] > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_mutants_in_calls_are_judged_as_those_of_all_ops(seed: int) -> None:
    """What the proof that remembers accepts the flat one accepts; it declines little that is right."""
    draw, verdicts = Random(seed), Counter[tuple[bool, bool]]()
    originals = [layered(name, layers=3) for name in ("ring", "upipe over rings", "zigzag, offloaded")]
    assert all(by_calls(recut(original, original)) for original in originals)
    for operator in OPERATORS:
        original = draw.choice(originals)
        mutant = OPERATORS[operator](draw, flattened(original))
        if mutant is None:
            continue
        try:
            cut = recut(mutant, original)
        except (KeyError, IndexError):  # a view of a buffer that is not there has no place in a call
            assert not by_all_ops(mutant)
            continue
        verdicts[by_calls(cut), by_all_ops(mutant)] += 1
    assert not verdicts[True, False]
    assert verdicts[True, True] > verdicts[False, True]
    assert verdicts[False, False] > 20


LAYERS = 32
RANKS = 4


def gathering(mistaken: int | None = None, given: int | None = None) -> Schedule:
    """Return products with weights that are sharded over the ranks and gathered before, one call each; where the
    gather of one layer may be given the shards of another.
    """
    workload = Workload(model=make_model(), seq=16, scope="layer", layers=LAYERS, passes="forward")
    ranks = Communicator(name="shards", groups=(tuple(range(RANKS)),))
    header = Header(name="gathering", workload=workload, mesh=Mesh(ring=RANKS), communicators=(ranks,))
    equation = next(one for one in LLAMA.forward.after if one.label == "w_gate")
    x, weight = equation.operands
    (product,) = equation.results

    rows = weight.shape(workload.model)[0]

    def share(extent: int, rank: int) -> tuple[Span]:
        return (Span(rank * extent // RANKS, (rank + 1) * extent // RANKS),)

    def program(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        tokens = share(workload.seq, rank)

        def begin(layer: int) -> tuple[View, View]:
            return b.input_of(x.later(layer), tokens), b.input_of(weight.later(layer), share(rows, rank))

        def gather(layer: int, shard: View) -> View:
            slot = b.new(weight.later(layer), rows)
            b.add(AllGather(label="gather", communicator=ranks.name, send=shard, recvs=Split(slot, 0, RANKS)))
            return slot

        def multiply(layer: int, own: View, whole: View) -> None:
            out = b.new(product, own.shape[1])
            b.add(Gemm(label="multiply", form="nn", a=own, b=whole, out=out))
            b.output_of(product.later(layer), tokens, out)

        inputs = [b.call("begin", at, lambda at=at: begin(at)) for at in range(LAYERS)]
        for at in range(LAYERS):
            own, shard = inputs[at]
            source = inputs[given][1] if at == mistaken and given is not None else shard
            slot = b.call("gather", at, lambda shard, at=at: gather(at, shard), source)
            b.call("multiply", at, lambda own, slot, at=at: multiply(at, own, slot), own, slot)
        return b.build()

    return Schedule(header, program)


def test_a_gather_of_layer_17_that_is_given_the_shards_of_layer_16() -> None:
    supersteps = Supersteps(gathering())
    supersteps.play()
    assert (supersteps.num_played, len(supersteps.all)) == (3, 3 * LAYERS)
    with pytest.raises(ScheduleError, match="Gemm form=nn of h2 of layer 17, w_gate of layer 16 is no equation"):
        check(gathering(17, 16))
    with pytest.raises(ScheduleError):
        Supersteps(gathering(17, 16)).play()


def test_calls_that_do_not_meet_are_left_to_the_flat_proof() -> None:
    """A rank whose communication lies in an earlier call than that of its peers."""
    schedule = layered("ring", 2)
    programs = schedule.programs
    calls = list(programs[0].calls)
    at = next(at for at, call in enumerate(calls) if call.fragment.ops)
    whole = programs[0].replace()
    empty = Call(Fragment((), (), (), (), ()), (), len(whole.buffers))
    programs[0] = Program.of_calls(0, [*whole.calls, *[empty] * (len(calls) - 1)])
    moved = Schedule(schedule.header, programs.__getitem__)
    assert at
    with pytest.raises(ScheduleError):
        Supersteps(moved)
    assert not by_calls(moved)
    check(moved)


@pytest.mark.parametrize(
    ("field", "value"),
    [("first", 0), ("given", ()), ("given", (0,) * 100), ("given", tuple(range(500, 600)))],
)
def test_a_call_that_fits_nothing_is_declined(field: str, value: object) -> None:
    schedule = layered("ring", 2)
    programs = schedule.programs
    calls = list(programs[1].calls)
    calls[-2] = calls[-2]._replace(**{field: value})  # type: ignore[arg-type]
    programs[1] = Program.of_calls(1, calls)
    with pytest.raises(Declined):
        Supersteps(Schedule(schedule.header, programs.__getitem__))
