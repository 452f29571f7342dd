"""Simulated schedules by hand, and what holds for every schedule on every cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType

from sim.accounts.breakdown import breakdown
from sim.accounts.trace import Trace
from sim.base.errors import InputError
from sim.engine.play.fold import Fold
from sim.engine.play.network import _SLACK
from sim.engine.play.simulate import simulate
from sim.engine.results.floors import floors
from sim.engine.results.report import report
from sim.schedule.ir.masks import FULL, Span
from sim.schedule.ir.ops import OFFLOAD, AllGather, Attend, HostSync
from sim.schedule.ir.program import Communicator, Header, Program, Schedule
from sim.schedule.proof.check import Checked, check
from sim.schedule.write.builder import ProgramBuilder
from sim.words.mesh import Mesh
from sim.words.workload import Workload
from tests.helpers import make_checked, make_cluster_spec, make_model
from topology.cluster import Cluster, load_cluster
from topology.specs import ClusterSpec, DramSpec, LinkSpec, NicSpec, PcieSpec, PerGpu, SocketSpec

# A block of full attention forward: 4 * 16 * 16 * 16 tokens^2 * heads. With 1000 tokens a rank and 4 heads of 16:
TOKENS, HEADS, DIM = 1000, 4, 16
BLOCK_S = 4 * TOKENS**2 * HEADS * DIM / 1e12
MERGE_S = 3 * TOKENS * HEADS * DIM / 1e12
KV_BYTES = 2 * TOKENS * HEADS * DIM * 4


def ring(ranks: int = 2, mask: str = "full", passes: str = "forward") -> Checked:
    model = make_model(HEADS, HEADS, DIM)
    workload = Workload(model=model, seq=TOKENS * ranks, mask=mask, passes=passes)  # type: ignore[arg-type]
    return make_checked("ring", workload, ranks)


def step_s(checked: Checked, spec: ClusterSpec) -> float:
    return simulate(checked, Cluster(spec), None).trace.step_time_s


def with_link(bytes_per_s: float, latency_s: float = 0.0, gpus: int = 2, **changes: Any) -> ClusterSpec:
    return make_cluster_spec(gpus, nvlink=LinkSpec(bytes_per_s=bytes_per_s, latency_s=latency_s), **changes)


def test_a_ring_of_two_hides_its_transfer_behind_the_first_block() -> None:
    """The hop takes half a block; both ranks compute two blocks without a pause, and merge."""
    spec = with_link(KV_BYTES / (BLOCK_S / 2))
    assert step_s(ring(), spec) == pytest.approx(2 * BLOCK_S + MERGE_S, rel=1e-6)


def test_a_slow_link_holds_the_second_block_up() -> None:
    """The hop takes three blocks, behind a latency of half a block: 3.5 + 1."""
    spec = with_link(KV_BYTES / (3 * BLOCK_S), latency_s=BLOCK_S / 2)
    assert step_s(ring(), spec) == pytest.approx(4.5 * BLOCK_S + MERGE_S, rel=1e-6)


def test_ranks_run_where_they_are_placed() -> None:
    """Inside a node the hop takes half a block and hides; to the other node it takes three: 3 + 1.
    A device of half the speed takes its time with it.
    """
    nic = NicSpec(bytes_per_s=KV_BYTES / (3 * BLOCK_S), latency_s=0.0)
    spec = with_link(KV_BYTES / (BLOCK_S / 2), nodes=2, nic=nic, per_gpu={3: PerGpu(speed=0.5)})
    two, cluster = ring(), Cluster(spec)
    inside, across = simulate(two, cluster, None), simulate(two, cluster, None, placement=(0, 2))
    assert inside.trace.step_time_s == pytest.approx(2 * BLOCK_S + MERGE_S, rel=1e-6)
    assert across.trace.step_time_s == pytest.approx(4 * BLOCK_S + MERGE_S, rel=1e-6)
    assert floors(Fold(two, across.cluster))["nic"] == pytest.approx(3 * BLOCK_S)
    slow = simulate(two, cluster, None, placement=(3, 2)).trace
    assert slow.step_time_s == pytest.approx(2 * (2 * BLOCK_S + MERGE_S), rel=1e-6), "its second block ends last"
    again = simulate(ring(4), cluster, None, placement=range(4))
    assert again.trace.rows == simulate(ring(4), cluster, None).trace.rows


@pytest.mark.parametrize("placement", [(0, 0), (0, 4), (-1, 0)])
def test_ranks_have_a_device_each(placement: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="expected different devices among 0 to 3"):
        simulate(ring(), Cluster(make_cluster_spec(4)), None, placement=placement)


def test_a_placement_has_a_device_for_every_rank() -> None:
    with pytest.raises(InputError, match="needs 2 GPUs, cluster 'toy' has 1"):
        simulate(ring(), Cluster(make_cluster_spec(4)), None, placement=(3,))


def test_on_cuda_communication_waits_for_the_kernels_issued_before_it() -> None:
    """A hop takes a quarter of a block; the second could follow at once, but torch lets it wait for the first block."""
    checked = ring(3, passes="forward")
    trace = simulate(checked, Cluster(with_link(KV_BYTES / (BLOCK_S / 4), gpus=3)), None).trace
    hops = [row.begin_s for row in trace.of_rank(0) if row.kind == "Exchange"]
    assert hops == pytest.approx([0.0, BLOCK_S])


def test_the_last_rank_sets_the_time_of_a_causal_ring() -> None:
    """Rank 3 of 4 computes its diagonal block (half) and three full ones."""
    spec = with_link(1e15, gpus=4)
    found = simulate(ring(4, "causal"), Cluster(spec), None).trace
    ends = [max(row.end_s for row in found.of_rank(rank) if row.kind == "Attend") for rank in range(4)]
    half = BLOCK_S * (TOKENS + 1) / TOKENS / 2
    merges = [0, 0, MERGE_S, 2 * MERGE_S]  # before the last block of each rank
    assert ends == pytest.approx([half + rank * BLOCK_S + merges[rank] for rank in range(4)], rel=1e-6)


def test_a_slow_gpu_makes_all_wait_in_an_all_to_all() -> None:
    """Ulysses with one GPU at half speed: its attention takes twice as long, and the all-to-all begins only then."""
    model = make_model(HEADS, HEADS, DIM)
    checked = make_checked("ulysses", Workload(model=model, seq=2 * TOKENS, mask="full", passes="forward"), 2)
    attention_s = 4 * (2 * TOKENS) ** 2 * HEADS / 2 * DIM / 1e12
    spec = with_link(1e18, per_gpu={1: PerGpu(speed=0.5)})
    found = simulate(checked, Cluster(spec), None).trace
    assert found.step_time_s == pytest.approx(2 * attention_s, rel=1e-6)
    waiting = next(row for row in found.of_rank(0) if row.label == "all-to-all out")
    assert waiting.begin_s - waiting.posted_s == pytest.approx(attention_s, rel=1e-6)
    assert breakdown(found, 0)["synchronisation"] == pytest.approx(attention_s, rel=1e-6)


def on_sms(waves: float) -> float:
    """Return the time of a ring of two, in blocks, on GPUs that take its grid of 32 tiles in so many waves.

    A hop, which takes as long as a block, holds a quarter of the SMs.
    """
    sms = round(32 / waves)
    gpu = msgspec.structs.replace(make_cluster_spec().gpu, sms=sms, communication_sms=sms // 4)
    return (step_s(ring(), with_link(KV_BYTES / BLOCK_S, gpu=gpu)) - MERGE_S) / BLOCK_S


def test_communication_waits_for_the_last_wave_of_the_grid_before_it() -> None:
    """Four waves: the hop begins with the last one, at 3/4, and ends at 1.75; the second block ends at 2.75."""
    assert on_sms(4) == pytest.approx(2.75, rel=1e-6)


def test_a_grid_leaves_sms_that_it_does_not_need() -> None:
    """Half a wave: what the hop holds is free. 32 tiles on 40 SMs, of which the hop holds 10: 30/32 of the speed while
    it runs, until 1; the remaining 1/16 takes as long again.
    """
    assert on_sms(0.5) == pytest.approx(2, rel=1e-6)
    assert on_sms(0.8) == pytest.approx(2 + 1 / 16, rel=1e-6)


def test_the_host_issues_one_op_after_the_other() -> None:
    """Launches of one block: op 0 (send) is issued at 1, op 1 (attend) at 2, op 2 (attend) at 3, op 3 (merge) at 4.

    The send waits for an event of the compute stream, as long as a launch: until 2. Kernels run as soon as they are
    issued and the one before has ended: attend 2-3, attend 3-4, merge at 4.
    """
    gpu = msgspec.structs.replace(make_cluster_spec().gpu, launch_s=BLOCK_S)
    found = simulate(ring(), Cluster(with_link(1e15, gpu=gpu)), None).trace
    assert [row.posted_s / BLOCK_S for row in found.of_rank(0)] == pytest.approx([2, 2, 3, 4], rel=1e-6)


def test_a_host_synchronisation_lets_the_host_fall_behind() -> None:
    """Two kernels of one block, launches of 0.1: without a synchronisation the second starts at 1.1, with one the host
    issues it only when the first has ended (at 1.1), and 0.1 later it starts: at 1.2, plus 0.1 for the sync itself.
    """
    starts = []
    for synchronise, calls in ((False, UNSET), (True, UNSET), (True, 3)):

        def build(rank: int, synchronise: bool = synchronise, calls: int | UnsetType = calls) -> Program:
            b = ProgramBuilder(rank, Workload(model=make_model(HEADS, HEADS, DIM), seq=TOKENS, mask="full"))
            tokens, heads = (Span(0, TOKENS),), Span(0, HEADS)
            q, k, v = (b.input(name, tokens, heads) for name in "qkv")
            for number in range(2):
                out, lse = b.like(f"out {number}", q, "attention"), b.lse(f"lse {number}", TOKENS, HEADS, "attention")
                b.add(Attend(label=f"attend {number}", q=q, k=k, v=v, out=out, lse=lse, band=FULL))
                if synchronise:
                    b.add(HostSync(streams=("compute",), calls=calls))
            return b.build()

        workload = Workload(model=make_model(HEADS, HEADS, DIM), seq=TOKENS, mask="full")
        schedule = Schedule(Header(name="two", workload=workload, mesh=Mesh()), build)
        gpu = msgspec.structs.replace(make_cluster_spec().gpu, launch_s=0.1 * BLOCK_S)
        found = simulate(check(schedule), Cluster(make_cluster_spec(1, gpu=gpu)), None).trace
        attends = [row.begin_s / BLOCK_S for row in found.rows if row.kind == "Attend"]
        starts.append(attends)
    assert starts[0] == pytest.approx([0.1, 1.1])
    assert starts[1] == pytest.approx([0.1, 1.2])
    assert starts[2] == pytest.approx([0.1, 1.2]), "the host makes its calls while the kernel runs"


def test_two_nodes_are_held_by_the_nic() -> None:
    """All-to-all of 4 ranks on 2 nodes: each rank's NIC carries half of what it sends, at a tenth of NVLink's rate."""
    model = make_model(4, 4, DIM)
    checked = make_checked("ulysses", Workload(model=model, seq=4 * TOKENS, mask="full", passes="forward"), 4)
    fast = LinkSpec(bytes_per_s=1e9, latency_s=0.0)
    one = make_cluster_spec(4, nvlink=fast)
    two = make_cluster_spec(2, nodes=2, nvlink=fast, nic=NicSpec(bytes_per_s=1e8, latency_s=0.0))
    part = TOKENS * 1 * DIM * 4  # what one rank sends another of one tensor
    for spec, per_call in ((one, 3 * part / 1e9), (two, 2 * part / 1e8)):
        found = simulate(checked, Cluster(spec), None).trace
        calls = [row for row in found.of_rank(0) if row.kind == "AllToAll"]
        assert [row.busy_s for row in calls] == pytest.approx([per_call] * 4, rel=1e-6)


def test_ring_collectives_use_every_nic() -> None:
    """All-gather over 2 nodes x 2 GPUs: two rings, each crossing by another NIC, so a NIC carries half of 3 parts."""
    everyone = Communicator(name="all", groups=((0, 1, 2, 3),))
    workload = Workload(model=make_model(4, 4, DIM), seq=4, passes="forward")

    def build(rank: int) -> Program:
        from sim.schedule.ir.views import Split

        b = ProgramBuilder(rank, workload)
        given = b.input("q", (Span(rank, rank + 1),), Span(0, 4))
        whole = b.tensor("whole", 4, 4, "other")
        b.add(AllGather(label="gather", communicator=everyone.name, send=given, recvs=Split(whole, 1, 4)))
        return b.build()

    header = Header(name="g", workload=workload, mesh=Mesh(ring=4), communicators=(everyone,))
    nic = NicSpec(bytes_per_s=1e3, latency_s=0.0)
    spec = make_cluster_spec(2, nodes=2, nvlink=LinkSpec(bytes_per_s=1e9, latency_s=0.0), nic=nic)
    part = 4 * DIM * 4
    assert step_s(check(Schedule(header, build)), spec) == pytest.approx(3 * part / 2 / 1e3, rel=1e-3)


def host_copies(ranks: int, *, both_ways: bool = False) -> Checked:
    """Every rank copies q to its host, and with ``both_ways`` at the same time k, which the host had before, back."""
    workload = Workload(model=make_model(4, 4, DIM), seq=1024 * ranks, passes="forward")

    def build(rank: int) -> Program:
        b = ProgramBuilder(rank, workload)
        q, k = (b.input(name, (Span(1024 * rank, 1024 * (rank + 1)),), Span(0, 4)) for name in "qk")
        k_there = b.elsewhere(k, "host")
        if both_ways:
            b.host_copy(k, k_there, "k out")
            b.add(HostSync(streams=(OFFLOAD,)))
        b.host_copy(q, b.elsewhere(q, "host"), "q out")
        if both_ways:
            b.host_copy(k_there, b.elsewhere(k, "hbm"), "k back")
        return b.build()

    return check(Schedule(Header(name="copies", workload=workload, mesh=Mesh(ring=ranks)), build))


def test_copies_to_the_host_share_the_way_there() -> None:
    """A tensor takes 1 s over a GPU's own link. Two GPUs behind one switch with an uplink as wide take 2 s; behind two
    1 s, if not the memory of their socket is slower than both together, with 1.6 of them: 1.25 s. Both ways at once
    take 1 s, and 2 / 1.6 s where the link gets no more than 1.6 times one way. One way before that takes 1 s.
    """
    part = 1024 * 4 * DIM * 4.0
    plain = LinkSpec(bytes_per_s=part, latency_s=0.0)
    duplex = LinkSpec(bytes_per_s=part, latency_s=0.0, both_ways_bytes_per_s=1.6 * part)

    def seconds(checked: Checked, per_switch: int, uplink: LinkSpec | None, dram: float) -> float:
        pcie = PcieSpec(bytes_per_s=part, latency_s=0.0, gpus_per_switch=per_switch, uplink=uplink)
        socket = SocketSpec(dram=DramSpec(capacity_bytes=2**40, bytes_per_s=dram * part))
        return step_s(checked, make_cluster_spec(2, pcie=pcie, socket=socket))

    assert seconds(host_copies(2), 2, plain, 9) == pytest.approx(2)
    assert seconds(host_copies(2), 1, plain, 9) == pytest.approx(1)
    assert seconds(host_copies(2), 2, None, 1.6) == pytest.approx(1.25)
    assert seconds(host_copies(1, both_ways=True), 1, plain, 9) == pytest.approx(1 + 1)
    assert seconds(host_copies(1, both_ways=True), 1, duplex, 9) == pytest.approx(1 + 1.25)


def test_more_than_a_socket_has_is_said() -> None:
    """Two GPUs a socket keep 256 KiB each there, of 300 kB."""
    pcie = PcieSpec(bytes_per_s=1e9, latency_s=0.0)
    checked, notes = host_copies(4), []
    for capacity in (300_000, 600_000):
        socket = SocketSpec(per_node=2, dram=DramSpec(capacity_bytes=capacity, bytes_per_s=1e9))
        simulation = simulate(checked, Cluster(make_cluster_spec(4, pcie=pcie, socket=socket)), None)
        notes.append([note for note in report(simulation).evidence.notes if "socket" in note])
    assert notes == [[f"socket {n} is given 0.0005243 GB to keep and has 0.0003 GB of memory" for n in (0, 1)], []]


def test_a_cluster_without_host_memory_says_so() -> None:
    with pytest.raises(InputError, match=r"no host memory: give it a table \[socket\]"):
        step_s(host_copies(1), make_cluster_spec(1))


@pytest.mark.sweep
def test_building_and_simulating_twice_gives_the_same_bits() -> None:
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2, per_gpu={3: PerGpu(speed=0.9)})
    workload = Workload(model=make_model(16, 16), seq=16 * 64, dtype="bf16")
    first, second = (simulate(make_checked("ring", workload, 16), Cluster(spec), None).trace for _ in range(2))
    assert first.rows == second.rows


@pytest.mark.parametrize(("slow", "longer"), [(0, 1.0), (3, 1 / 0.8)])
def test_who_waits_for_a_slow_gpu(slow: int, longer: float) -> None:
    """The first rank of a causal ring has one block of four to do, and the last one, whom all wait for, all of them."""
    spec = with_link(1e15, gpus=4)
    slowed = msgspec.structs.replace(spec, per_gpu={slow: PerGpu(speed=0.8)})
    checked = ring(4, "causal")
    assert step_s(checked, slowed) == pytest.approx(longer * step_s(checked, spec), rel=1e-3)


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="needs 4 GPUs, cluster 'toy' has 2"):
        simulate(ring(4), Cluster(make_cluster_spec(2)), None)


RATES = st.floats(1e8, 1e13)


@st.composite
def machines(draw: st.DrawFn, latencies: st.SearchStrategy[float] = st.floats(0, 1e-3)) -> tuple[Checked, ClusterSpec]:
    """A schedule and a cluster that can play it."""
    name = draw(st.sampled_from(("ring", "ulysses")))
    ranks = draw(st.sampled_from((1, 2, 4, 8)))
    nodes = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
    heads = draw(st.sampled_from((8, 16)))
    workload = Workload(
        model=make_model(heads, 8, draw(st.sampled_from((8, 64)))),
        seq=ranks * draw(st.integers(1, 512)),
        batch=draw(st.integers(1, 2)),
        mask=draw(st.sampled_from(("causal", "full"))),
        dtype=draw(st.sampled_from(("fp64", "fp32", "bf16"))),
        passes=draw(st.sampled_from(("forward", "backward", "both"))),
    )
    base = make_cluster_spec()
    held = draw(st.integers(0, 40))
    gpu = msgspec.structs.replace(
        base.gpu,
        communication_sms=held,
        launch_s=draw(latencies),
        peak_flops_per_s=dict.fromkeys(base.gpu.peak_flops_per_s, draw(RATES)),
    )
    slow = draw(st.dictionaries(st.integers(0, ranks - 1), st.floats(0.5, 1.5).map(lambda x: PerGpu(speed=x))))
    gpus = ranks // nodes
    nics = draw(st.sampled_from([None, *(n for n in (1, 2, 4, 8, 16) if gpus % n == 0 or n % gpus == 0)]))
    nvlink = LinkSpec(bytes_per_s=draw(RATES), latency_s=draw(latencies))
    nic = NicSpec(bytes_per_s=draw(RATES), latency_s=draw(latencies), per_node=nics)
    spec = make_cluster_spec(
        gpus,
        nodes=nodes,
        gpu=gpu,
        per_gpu=slow,
        hbm=msgspec.structs.replace(base.hbm, bytes_per_s=draw(RATES)),
        nvlink=nvlink,
        nic=nic,
    )
    return make_checked(name, workload, ranks), spec


@pytest.mark.sweep
@given(machines())
def test_no_prediction_is_below_a_floor_or_above_the_sum(machine: tuple[Checked, ClusterSpec]) -> None:
    checked, spec = machine
    cluster = Cluster(spec)
    simulation = simulate(checked, cluster, None)
    found: Trace = simulation.trace
    for name, lower in floors(Fold(checked, cluster)).items():
        assert found.step_time_s >= lower / _SLACK * (1 - 1e-12), name  # so much too full a link may be
    held = 3 * spec.gpu.communication_sms / spec.gpu.sms  # a ring has two communicators at work, Ulysses one
    slowest = min((special.speed for special in spec.per_gpu.values()), default=1.0)
    serial = 0.0
    for rank, program in enumerate(checked.schedule.programs):
        for index, use in enumerate(checked.kernels[rank]):
            if use is not None:
                peak = cluster.peak_flops_per_s(rank, use.dtype)
                serial += max(use.flops / peak, use.hbm_bytes / spec.hbm.bytes_per_s)
            else:
                row = next(row for row in found.of_rank(rank) if row.op == index)
                serial += row.busy_s
        serial += len(program.ops) * spec.gpu.launch_s
    assert found.step_time_s <= serial / max(1 - held, 0.1) / min(slowest, 1.0) * (1 + 1e-9)


@given(machines())
@pytest.mark.sweep
def test_the_report_holds_together(machine: tuple[Checked, ClusterSpec]) -> None:
    checked, spec = machine
    simulation = simulate(checked, Cluster(spec), None)
    found = report(simulation)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    workload = checked.schedule.header.workload
    tokens = workload.batch * workload.seq / checked.schedule.num_ranks
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / found.step_time_s)
    assert found.mfu is not None
    assert 0 < found.mfu <= 1
    assert sum(found.memory.values()) == found.peak_hbm_bytes
    assert found.fits is None
    assert found.schedule_hash == checked.schedule.hash
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


@given(machines(latencies=st.just(0.0)))
@pytest.mark.sweep
def test_all_rates_doubled_at_zero_latency_halves_the_time(machine: tuple[Checked, ClusterSpec]) -> None:
    checked, spec = machine
    doubled = msgspec.structs.replace(
        spec,
        gpu=msgspec.structs.replace(
            spec.gpu, peak_flops_per_s={name: 2 * peak for name, peak in spec.gpu.peak_flops_per_s.items()}
        ),
        hbm=msgspec.structs.replace(spec.hbm, bytes_per_s=2 * spec.hbm.bytes_per_s),
        nvlink=spec.nvlink and msgspec.structs.replace(spec.nvlink, bytes_per_s=2 * spec.nvlink.bytes_per_s),
        nic=spec.nic and msgspec.structs.replace(spec.nic, bytes_per_s=2 * spec.nic.bytes_per_s),
    )
    assert step_s(checked, doubled) == pytest.approx(step_s(checked, spec) / 2, rel=1e-6)
