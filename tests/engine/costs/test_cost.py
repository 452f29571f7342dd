"""Measured costs: points come back, what-ifs reach them, and what was not measured is said."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.published.reading import square_attention
from sim.base.errors import InputError
from sim.base.overrides import override
from sim.engine.costs.cost import CostModel
from sim.engine.costs.kernel_table import KernelTable
from sim.engine.costs.phases import Activity, Flow, Latency, Wait
from sim.engine.costs.series import Figures, Series, Work
from sim.engine.costs.transfer_table import waits_s
from sim.engine.intervals.interval import _by_sources
from sim.engine.play.fold import Fold
from sim.engine.play.simulate import simulate
from sim.engine.results.floors import floors
from sim.schedule.derive.kernels import SCATTERED, KernelUse, attention_use, in_place_of
from sim.schedule.ir.masks import CAUSAL, FULL, DocumentBlock, Span
from sim.schedule.ir.ops import AllGather, AllReduce, Exchange, Message
from sim.schedule.ir.views import Split, View
from sim.words.profile import SLICE_BACK, Issue, Machine, Point, Profile, Spread, load_profile
from sim.words.workload import Workload
from tests.helpers import make_checked, make_cluster_spec, make_model
from topology.cluster import Cluster, load_cluster
from topology.lab import lab_spec
from topology.specs import ClusterSpec, HbmSpec, LinkSpec, PerGpu

SPEC = make_cluster_spec(
    4, hbm=HbmSpec(capacity_bytes=2**40, bytes_per_s=1e11), nvlink=LinkSpec(bytes_per_s=1e10, latency_s=1e-5)
)


def point(kernel: str, shape: tuple[int, ...], seconds: float, **fields: Any) -> Point:
    times = {"median_s": seconds, "mean_s": seconds, "low_s": seconds, "high_s": seconds, "runs": 5}
    options: dict[str, Any] = {"dtype": "fp32", "condition": "idle"} | times | fields
    return Point(kernel=kernel, shape=shape, **options)


def attention_point(length: int, efficiency: float, heads: int = 4, *, causal: bool = False) -> Point:
    use = attention(length, heads, causal=causal)
    return point(
        use.kernel, use.shape, use.flops / 1e12 / efficiency, variant=use.variant, flops=use.flops, nbytes=use.hbm_bytes
    )


def attention(length: int, heads: int = 4, *, causal: bool = False) -> KernelUse:
    return attention_use(False, "fp32", (1, length, heads, 64), length, heads, CAUSAL if causal else FULL)


def profile(*points: Point, spec: ClusterSpec = SPEC) -> Profile:
    return Profile(
        name="test",
        created="2026-01-01",
        command="",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, cores=1, threads_per_rank=1, software={}),
        cluster=msgspec.to_builtins(spec, str_keys=True),
        points=points,
    )


def seconds(activity: Activity) -> float:
    return sum(phase.seconds for phase in activity if isinstance(phase, Flow | Latency))


def cost(*points: Point, spec: ClusterSpec = SPEC) -> CostModel:
    return CostModel(Cluster(spec), profile(*points))


def test_a_measured_point_comes_back_exactly() -> None:
    model = cost(attention_point(512, 0.4), attention_point(1024, 0.6), attention_point(4096, 0.7))
    for length, efficiency in ((512, 0.4), (1024, 0.6), (4096, 0.7)):
        use = attention(length)
        assert seconds(model.kernel(0, use)) == pytest.approx(use.flops / 1e12 / efficiency)
    assert not model.notes


@pytest.mark.parametrize(("kernel", "op_type"), [("all_gather", AllGather), ("all_reduce", AllReduce)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_measured_collective_comes_back_exactly(kernel: str, op_type: type, ranks: int) -> None:
    """However many steps it has: the measured time has all of their latencies in it."""
    sent = {size: size * (ranks - 1) // ranks * (2 if kernel == "all_reduce" else 1) for size in (2**12, 2**16, 2**24)}
    points = [point(kernel, (ranks, size), 1e-3 + n / 5e9, nbytes=n) for size, n in sent.items()]
    view = View(0, ((0, 1),))
    fields = {"view": view} if kernel == "all_reduce" else {"send": view, "recvs": Split(view, 0, 1)}
    op = op_type(label="", communicator="link", **fields)
    for size, n in sent.items():
        part = size if kernel == "all_reduce" else size // ranks
        activity = cost(*points).collective(op, tuple(range(ranks)), part)
        assert sum(phase.seconds for phase in activity) == pytest.approx(1e-3 + n / 5e9)


def test_a_matrix_product_borrows_the_efficiency_of_the_nearest_shape() -> None:
    points = [
        point(
            "gemm",
            (tokens, 512, n),
            2 * tokens * 512 * n / 1e12 / rate,
            variant="nn",
            flops=2 * tokens * 512 * n,
            nbytes=1,
        )
        for tokens in (256, 1024)
        for n, rate in ((256, 0.25), (1536, 0.5))
    ]
    for n, rate, noted in ((256, 0.25, False), (1536, 0.5, False), (2048, 0.5, True), (300, 0.25, True)):
        model = cost(*points)
        use = KernelUse("gemm", "nn", "fp32", (512, 512, n), 2 * 512 * 512 * n, 1)
        assert seconds(model.kernel(0, use)) == pytest.approx(use.flops / 1e12 / rate)
        assert bool(model.notes) == noted


def test_between_points_the_efficiency_is_interpolated_along_the_logarithm() -> None:
    points = [attention_point(length, efficiency) for length, efficiency in ((1024, 0.6), (2048, 0.6), (8192, 0.8))]
    use = attention(4096)
    assert seconds(cost(*points).kernel(0, use)) == pytest.approx(use.flops / 1e12 / 0.7)


def test_time_grows_with_the_number_of_heads() -> None:
    points = [attention_point(1024, 0.5, heads) for heads in (4, 16)]
    for heads in (2, 4, 8, 16, 64):
        use = attention(1024, heads)
        model = cost(*points)
        assert seconds(model.kernel(0, use)) == pytest.approx(use.flops / 1e12 / 0.5)
        assert bool(model.notes) == (heads == 64)


def test_beyond_twice_the_measured_range_it_says_so() -> None:
    points = [attention_point(length, 0.5) for length in (512, 1024)]
    for length, extrapolated in ((256, False), (2048, False), (4096, True), (128, True)):
        model = cost(*points)
        model.kernel(0, attention(length))
        assert any("beyond the measured range" in note for note in model.notes) == extrapolated


def test_another_mask_head_dim_or_type_borrows_and_says_so() -> None:
    model = cost(attention_point(1024, 0.5))
    use = attention(1024, causal=True)
    assert seconds(model.kernel(0, use)) == pytest.approx(use.flops / 1e12 / 0.5)
    assert model.notes == {"attention_forward causal fp32: efficiency of attention_forward full fp32"}
    model = cost(attention_point(1024, 0.5))
    model.kernel(0, attention_use(False, "fp32", (1, 1024, 4, 128), 1024, 4, FULL))
    assert model.notes == {"attention_forward of head dim 128: efficiency of head dim 64"}
    model = cost(attention_point(1024, 0.5))
    model.kernel(0, attention_use(True, "bf16", (1, 1024, 4, 64), 1024, 4, FULL))
    assert model.notes == {"attention_backward bf16: not in the profile, datasheet rate"}


def test_what_ifs_reach_measured_costs() -> None:
    """Attention is bound by compute: twice the peak halves it, twice the memory bandwidth changes nothing. A copy is
    the other way round. A transfer follows the link's rate and latency.
    """
    copy = KernelUse("copy", "", "fp32", (2**20,), 0, 2**23)
    points = (
        attention_point(1024, 0.5),
        point("copy", (2**20,), 2**23 / 0.8e11, nbytes=2**23),
        *(point("exchange", (4, n), 2e-5 + n / 0.5e10, nbytes=n) for n in (2**16, 2**20, 2**24)),
    )
    base = cost(*points)

    def what_if(key: str, value: str) -> CostModel:
        return CostModel(Cluster(override(SPEC, [(key, value)], "--set")), profile(*points))

    use = attention(1024)
    faster = what_if("gpu.peak_flops_per_s.fp32", "*2")
    assert seconds(faster.kernel(0, use)) == pytest.approx(seconds(base.kernel(0, use)) / 2)
    assert seconds(faster.kernel(0, copy)) == seconds(base.kernel(0, copy))
    wider = what_if("hbm.bytes_per_s", "*2")
    assert seconds(wider.kernel(0, use)) == seconds(base.kernel(0, use))
    assert seconds(wider.kernel(0, copy)) == pytest.approx(seconds(base.kernel(0, copy)) / 2)
    slow = what_if("gpu[0].speed", "0.5")
    assert seconds(slow.kernel(0, use)) == pytest.approx(2 * seconds(base.kernel(0, use)))
    assert seconds(slow.kernel(1, use)) == seconds(base.kernel(1, use))
    size = 2**24
    assert seconds(base.transfer(0, 1, size, (0, 1, 2, 3))) == pytest.approx(2e-5 + size / 0.5e10)
    linked = what_if("nvlink.bytes_per_s", "*4")
    assert seconds(linked.transfer(0, 1, size, (0, 1, 2, 3))) == pytest.approx(2e-5 + size / 2e10)
    near = what_if("nvlink.latency_s", "/2")
    assert seconds(near.transfer(0, 1, size, (0, 1, 2, 3))) == pytest.approx(1e-5 + size / 0.5e10)


def test_memory_takes_over_as_the_bound_when_it_is_made_slow() -> None:
    use = attention(1024)
    slow = CostModel(
        Cluster(override(SPEC, [("hbm.bytes_per_s", "1e6")], "--set")), profile(attention_point(1024, 0.5))
    )
    assert seconds(slow.kernel(0, use)) == pytest.approx(use.hbm_bytes / 1e6)


def test_a_cache_resident_kernel_is_no_slower_than_measured() -> None:
    """A copy that was measured at four times the memory bandwidth demands the memory's capacity, not more."""
    copy = KernelUse("copy", "", "fp32", (2**16,), 0, 2**19)
    model = cost(point("copy", (2**16,), 2**19 / 4e11, nbytes=2**19))
    (flow,) = model.kernel(0, copy)
    assert isinstance(flow, Flow)
    assert flow.seconds == pytest.approx(2**19 / 4e11)
    assert max(amount for _, amount in flow.demands) == 1e11


def test_a_profile_of_another_device_is_refused() -> None:
    other = make_cluster_spec(4, gpu=msgspec.structs.replace(SPEC.gpu, name="other GPU"))
    with pytest.raises(InputError, match="is of 'toy GPU', but cluster 'toy' has 'other GPU'.*`profile`"):
        CostModel(Cluster(other), profile(attention_point(1024, 0.5)))


SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=6, unique=True)


@given(SIZES, st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6), st.integers(1, 10**7))
def test_no_lookup_is_below_the_peak(sizes: list[int], efficiencies: list[float], wanted: int) -> None:
    on = Figures(1e12, 1e11)
    points = [
        (Work(flops=1000 * n, nbytes=1, size=n), 1000 * n / 1e12 / e) for n, e in zip(sizes, efficiencies, strict=False)
    ]
    series = Series(points, on)
    assert series.seconds(Work(1000 * wanted, 1, wanted), on) >= 1000 * wanted / 1e12 * (1 - 1e-12)
    for work, time in points:
        assert series.seconds(work, on) == pytest.approx(time)


@pytest.mark.sweep
@given(
    st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
    st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    st.sampled_from(("ring", "ulysses")),
    st.sampled_from((2, 4)),
)
def test_no_measured_prediction_is_below_a_floor(
    kernels: list[float], links: list[float], name: str, ranks: int
) -> None:
    sizes = (64, 256, 1024, 4096)
    points = [
        attention_point(length, e, 8, causal=c) for length, e in zip(sizes, kernels, strict=True) for c in (True, False)
    ]
    points += [
        point(kind, (ranks, n), 2e-5 + n / 1e10 / e, nbytes=n)
        for kind in ("exchange", "all_to_all")
        for n, e in zip((2**10, 2**16, 2**22), links, strict=True)
    ]
    workload = Workload(model=make_model(8, 4, 64), seq=512 * ranks)
    checked, cluster = make_checked(name, workload, ranks), Cluster(SPEC)
    step_s = simulate(checked, cluster, profile(*points)).trace.step_time_s
    for resource, lower in floors(Fold(checked, cluster)).items():
        assert step_s >= lower * (1 - 1e-9), resource


def test_the_host_pays_for_each_call_and_each_eager_kernel() -> None:
    """A launch takes 1: a send alone 10 + 1, four messages in one call 20 + 1 + 4 * 5; merges of 9 kernels of 3 + 1."""
    gpu = msgspec.structs.replace(SPEC.gpu, launch_s=1.0)
    issue = {
        "kernel": Issue(host_s=3.0),
        "merge": Issue(host_s=0.0, launches=0, kernels=9),
        SLICE_BACK: Issue(host_s=0.0, launches=0, kernels=2),
        "attention_backward": Issue(host_s=7.0, launches=2, kernels=1),
        "call": Issue(host_s=10.0),
        "exchange": Issue(host_s=20.0),
        "message": Issue(host_s=5.0, launches=0),
    }
    spec = msgspec.structs.replace(SPEC, gpu=gpu)
    known, bare = (
        CostModel(Cluster(spec), msgspec.structs.replace(profile(spec=spec), issue=some)) for some in (issue, {})
    )
    view = View(0, ((0, 1),))
    message = Message(1, view)
    one = Exchange(label="", communicator="", sends=(message,), recvs=())
    four = Exchange(label="", communicator="", sends=(message,) * 2, recvs=(message,) * 2)
    assert [known.issue_s(one, None), known.issue_s(four, None)] == [11, 41]
    uses = [KernelUse(name, "", "bf16", (1,), 0, 1) for name in ("merge", "copy", "attention_backward")]
    assert [known.issue_s(one, use) for use in uses] == [36, 4, 7 + 2 + 4]
    assert known.issue_s(one, uses[0]._replace(into_slice=True)) == 36 + 2 * 4
    assert [bare.issue_s(op, use) for op, use in ((one, None), (four, None), (one, uses[0]))] == [1, 1, 1]


def test_a_merge_of_some_rows_copies_them_back_where_code_merges_out_of_place() -> None:
    """Zigzag's second half of a rank's rows: 38 bytes an element and 8 more. Code that merges in place has none."""
    workload = Workload(model=make_model(4, 4, 16), seq=64, dtype="bf16", passes="forward")
    checked = make_checked("zigzag", workload, 2)
    merges = [[use for use in uses if use and use.kernel == "merge"] for uses in checked.kernels]
    assert [[use.into_slice for use in uses] for uses in merges] == [[True], [False]]
    half, whole = merges[0][0], merges[1][0]
    spec = override(SPEC, [("hbm.bytes_per_s", "1e6")], "")  # so that memory bounds it
    eager = msgspec.structs.replace(profile(spec=spec), traffic={"merge": 3.8, SLICE_BACK: 0.8})
    taken = {use: CostModel(Cluster(spec), eager).kernel_seconds(0, use)[0] for use in (half, whole)}
    assert taken[half] / (half.hbm_bytes / 1e6) == pytest.approx(4.6)
    assert taken[whole] / (whole.hbm_bytes / 1e6) == pytest.approx(3.8)


def test_what_is_launched_without_points_takes_a_small_kernels_time_beside_its_bytes() -> None:
    """By hand at 100 GB/s: 8 MB take 80 us, and 2 us more of a kernel in a queue, which faster memory leaves as they
    are. Eager kernels that stand for one take it each, and so does what copies a slice back. A point has its own.
    """
    small = msgspec.structs.replace(
        profile(attention_point(1024, 0.5)),
        replayed_s=2e-6,
        replayed=Spread(low=0.5, high=1.5),
        issue={"merge": Issue(host_s=0, launches=0, kernels=9), SLICE_BACK: Issue(host_s=0, launches=0, kernels=2)},
    )
    copy = KernelUse("copy", "", "fp32", (10**6,), 0, 8 * 10**6)
    three = KernelUse("swiglu", "eager", "fp32", (10**6,), 0, 0)
    three = in_place_of(three, [("silu", "fp32", 8, 1), ("mul", "fp32", 8, 2)])
    merge = copy._replace(kernel="merge")
    takes_us = [(copy, 82), (three, 3 * 82), (merge, 98), (merge._replace(into_slice=True), 102)]
    takes_us += [(copy._replace(hbm_bytes=0), 0), (attention(1024), attention(1024).flops / 1e12 / 0.5 * 1e6)]
    model = CostModel(Cluster(SPEC), small)
    assert [seconds(model.kernel(0, use)) * 1e6 for use, _ in takes_us] == pytest.approx([us for _, us in takes_us])
    twice = CostModel(Cluster(override(SPEC, [("hbm.bytes_per_s", "*2")], "`set`")), small)
    assert seconds(twice.kernel(0, copy)) == pytest.approx(42e-6)
    ends = [CostModel(Cluster(SPEC), end) for end in _by_sources(small)]
    assert [seconds(end.kernel(0, copy)) for end in ends] == pytest.approx([81e-6, 83e-6])
    without = CostModel(Cluster(SPEC), None)
    assert seconds(without.kernel(0, copy)) == pytest.approx(80e-6)


def test_what_casts_reads_one_element_at_a_time() -> None:
    """By hand at 100 GB/s: 60 MB take 600 us, and 1.3 times that where ATen casts, whatever points of sums there are.
    Where nothing says how much longer it is, a sum is as measured.
    """
    ten_million = (10**7,)
    sum_of_one = point("accumulate", ten_million, 1e-3, dtype="bf16", nbytes=6 * 10**7)
    known = profile(sum_of_one)
    slow = msgspec.structs.replace(known, elementwise={SCATTERED: 1.3})
    copy = KernelUse("copy", "", "bf16", ten_million, 0, 6 * 10**7)
    added = copy._replace(kernel="accumulate")
    for profiled, expected_us in ((slow, [600, 780, 1000, 780]), (known, [600, 600, 1000, 1000])):
        model = CostModel(Cluster(SPEC), profiled)
        uses = [one._replace(casts=casts) for one in (copy, added) for casts in (False, True)]
        assert [seconds(model.kernel(0, use)) * 1e6 for use in uses] == pytest.approx(expected_us)


def test_a_data_type_that_the_measured_machine_has_no_peak_for_is_refused() -> None:
    gpu = msgspec.structs.replace(SPEC.gpu, peak_flops_per_s={"fp32": 1e12, "bf16": 2e12})
    measured_on = msgspec.structs.replace(SPEC, gpu=gpu)
    for one in (point("gemm", (64, 64, 64), 1e-3, dtype="fp64"), attention_point(1024, 0.5)):
        known = profile(one, spec=measured_on)
        with pytest.raises(InputError, match="'test' is of a machine without a peak for fp64.* are fp32, bf16; set `d"):
            CostModel(Cluster(SPEC), known).kernel_seconds(0, attention(64)._replace(dtype="fp64"))
    CostModel(Cluster(SPEC), profile(attention_point(1024, 0.5), spec=measured_on)).kernel(0, attention(64))


def test_a_kernel_is_looked_up_once_for_all_gpus_of_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    lookup = KernelTable.seconds

    def counted(self: KernelTable, use: KernelUse, now: Figures, power_w: float | None) -> tuple[float, str] | None:
        looked_up.append((use, now))
        return lookup(self, use, now, power_w)

    monkeypatch.setattr(KernelTable, "seconds", counted)
    spec = msgspec.structs.replace(SPEC, per_gpu={2: PerGpu(speed=0.5)})
    model = CostModel(Cluster(spec), profile(attention_point(1024, 0.5)))
    took = [seconds(model.kernel(rank, attention(1024))) for rank in range(4)]
    assert took == pytest.approx([took[0], took[0], 2 * took[0], took[0]])
    assert len(looked_up) == 2


def test_a_copy_of_integers_takes_what_memory_takes() -> None:
    """Of token ids: nothing is computed, so the GPU needs no peak for them. 800 bytes read and written at 1e11/s."""
    use = KernelUse("copy", "", "int64", (100,), 0, 1600)
    seconds, note = CostModel(Cluster(SPEC), None).kernel_seconds(0, use)
    assert seconds == pytest.approx(1600 / 1e11)
    assert note == ""


def test_a_cpu_takes_documents_one_after_the_other_each_at_the_rate_of_its_length() -> None:
    """A GPU has them in one launch of all lengths; how fast that is the tile model of its profile says."""
    cpu = load_cluster("host")
    host = msgspec.structs.replace(
        SPEC, gpu=msgspec.structs.replace(SPEC.gpu, kind="cpu"), host=cpu.host, loopback=cpu.loopback
    )
    points = attention_point(256, 0.2, causal=True), attention_point(1024, 0.5, causal=True)
    parts = tuple(
        DocumentBlock(Span(start, start + size), Span(start, start + size), CAUSAL)
        for start, size in ((0, 1024), (1024, 256), (1280, 256))
    )
    packed = attention_use(False, "fp32", (1, 1536, 4, 64), 1536, 4, FULL, parts)
    model = cost(*points, spec=host)
    alone = [seconds(model.kernel(0, attention(length, causal=True))) for length in (1024, 256)]
    assert seconds(model.kernel(0, packed)) == pytest.approx(alone[0] + 2 * alone[1])
    assert seconds(cost(*points).kernel(0, packed)) < alone[0] + 2 * alone[1]


def test_messages_that_are_alike_cost_what_each_costs_by_itself() -> None:
    """A model that has costed like ones before gives, to the bit, what a new one does."""
    spec = msgspec.structs.replace(load_cluster("hgx-h100"), nodes=2)
    profile, group = load_profile("h100-sxm"), tuple(range(16))
    known = CostModel(Cluster(spec), profile)
    for source, target in ((0, 1), (1, 2), (7, 0), (0, 8), (3, 11), (2, 13), (15, 7)):
        for nbytes in (2**20, 2**25):
            alone = CostModel(Cluster(spec), profile).transfer(source, target, nbytes, group)
            assert known.transfer(source, target, nbytes, group) == alone


def test_small_collectives_wait_for_their_turns_beside_kernels_as_long_as_was_measured() -> None:
    """Four ranks on two cores are two rounds, so 12 ms more are 6 ms a round; the smallest counts, and what was not
    measured both ways, or took less, waits for nothing.
    """
    points = [
        point("all_reduce", (4, 4096), 0.002, nbytes=6144),
        point("all_reduce", (4, 4096), 0.014, nbytes=6144, condition="busy"),
        point("all_reduce", (4, 8192), 0.002, nbytes=12288),
        point("all_reduce", (4, 8192), 0.1, nbytes=12288, condition="busy"),
        point("all_gather", (4, 4096), 0.002, nbytes=3072),
        point("all_gather", (4, 4096), 0.001, nbytes=3072, condition="busy"),
        point("reduce_scatter", (4, 4096), 0.002, nbytes=3072, condition="busy"),
    ]
    assert waits_s(points, 2.0) == {"all_reduce": pytest.approx(0.006), "all_gather": 0.0}
    assert waits_s(points[:2], 8.0) == {"all_reduce": pytest.approx(0.012)}


def test_collectives_over_slow_links_wait_by_their_kind() -> None:
    """Among ranks whose links are so slow that their threads sleep; of others the host's figure counts, as ever."""
    points = [
        point("all_reduce", (4, 4096), 0.002, nbytes=6144),
        point("all_reduce", (4, 4096), 0.014, nbytes=6144, condition="busy"),
    ]
    host = load_cluster("host")
    assert host.host
    host = msgspec.structs.replace(host, host=msgspec.structs.replace(host.host, cores=2.0, wakeup_s=1e-3))
    slow = lab_spec(host, "flat", 4, 25e6)
    assert slow.host
    slow = msgspec.structs.replace(slow, host=msgspec.structs.replace(slow.host, transfer_s_per_byte=0.0))
    view = View(0, ((0, 1),))
    ops = [
        AllReduce(label="", communicator="link", view=view),
        AllGather(label="", communicator="link", send=view, recvs=Split(view, 0, 1)),
    ]
    for spec, waits in ((host, (1e-3, 1e-3)), (slow, (6e-3, 1e-3))):
        model = CostModel(Cluster(spec), profile(*points, spec=spec))
        for op, expected_s in zip(ops, waits, strict=True):
            (wait,) = [phase for phase in model.collective(op, (0, 1), 4096) if isinstance(phase, Wait)]
            assert wait.seconds == pytest.approx(expected_s)


def test_products_on_hopper_are_persistent_grids_and_attention_is_not() -> None:
    """Beside an all-gather of 24 blocks one has 47 % of the peak and not 80; at the lower end no grid is persistent."""
    profile, cluster = load_profile("h100-sxm"), Cluster(load_cluster("hgx-h100"))
    shape = (8192, 4096, 4096)
    product = KernelUse("gemm", "nn", "bf16", shape, 2 * math.prod(shape), 2 * 3 * 4096 * 8192)

    def late(profile: Profile, use: KernelUse) -> list[float]:
        return [phase.late for phase in CostModel(cluster, profile).kernel_anywhere(0, use) if isinstance(phase, Flow)]

    assert late(profile, product) == [pytest.approx((80 / 47 - 1) / 24, rel=1e-3)]
    assert late(msgspec.structs.replace(profile, bound="low"), product) == [0]
    assert late(msgspec.structs.replace(profile, bound="high"), product) == [1]
    assert set(late(profile, square_attention(False, (1, 8192, 32, 128), CAUSAL))) == {0}
    for other in ("a100-sxm", "b200-sxm"):
        assert not load_profile(other).persistent
