"""Profiles of attention alone, by kernels that no profile of a GPU has: ``software.attention`` chooses one.

Where no table has a kernel on a GPU, another kernel that was timed there stands in: its points, times the ratio of the
two kernels at the same shape on another GPU. Where ratios at several shapes differ, intervals are as much wider.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from calibrate.held.tiles import tile_models
from calibrate.published import curves, ultraattn
from calibrate.published.curves import Timed
from calibrate.published.reading import geometric_mean, square_attention
from calibrate.published.sustained import B200, GB200, GB300, H100, NOT_AT_THE_LIMIT, UnderLoad
from sim.engine.costs.tiles import use_of
from sim.schedule.derive.kernels import ATTENTION_KERNELS, KernelUse
from sim.schedule.ir.masks import CAUSAL, FULL
from sim.words.options import FusedName
from sim.words.profile import FusedAttention, Machine, Point, Profile, Sustained, shipped_profile
from topology.cluster import load_cluster

FOLDER = "attention"
"""Of these tables, below that of profiles."""
_PAPERS = "bar labels of arXiv:2407.08608 Fig. 5 (forward), a machine transcription of its Fig. 6 (full backward)"
_CHARTS = "bar charts of SandAI-org/MagiAttention@2c64135, digitised"
_SUMS = "arXiv:2307.08691 Fig. 4 and Dao-AILab/flash-attention@0251105 assets, bar labels of both passes together"
_BLOCKS = {"attention_forward": 2, "attention_backward": 1}
"""Of flash-attn 2 with 128 dimensions, that an SM runs at once: as in ``ultraattn``."""


_CUDNN = ("cudnn", "sdpa")
"""Bars of cuDNN in the charts: torch's own attention has such rates on Hopper and later by cuDNN only."""


class Timings(NamedTuple):
    """What is known of a kernel on a GPU."""

    timed: list[Timed]
    apart: Mapping[str, float] = {}
    """By kernel, the factor by which it may be off, beside what two times of the same work say."""


class Table(NamedTuple):
    """Where the attention of one kernel on one GPU is."""

    cluster: str
    attention: FusedAttention
    timings: Callable[[], Timings]
    source: str
    sustained: dict[str, Sustained]
    blocks: dict[str, int]


def _peak(cluster: str) -> float:
    return load_cluster(cluster).gpu.peak_flops_per_s["bf16"]


_FASTER_THAN_B200 = {name: _peak(name) / _peak("hgx-b200") for name in ("gb200-nvl72", "gb300-nvl72")}
"""Peaks of GPUs over that of B200."""


def profile_of(name: str, table: Table) -> Profile:
    """Return the profile of a table, of attention alone."""
    spec = load_cluster(table.cluster)
    found = table.timings()
    points, sources = curves.averaged(found.timed).points, _between_sources(found.timed)
    apart = {kernel: max(sources.get(kernel, 1.0), found.apart.get(kernel, 1.0)) for kernel in ATTENTION_KERNELS}
    return Profile(
        name=name,
        created=table.attention.said,
        command=f"longstep calibrate --published {name}",
        complete=True,
        machine=Machine(gpu=spec.gpu.name, software={}),
        cluster=spec.figures(),
        points=tuple(points),
        attention=table.attention,
        tiles=tile_models(points, spec.gpu.sms),
        blocks_per_sm=table.blocks,
        sustained={kernel: one for kernel, one in table.sustained.items() if kernel in ATTENTION_KERNELS},
        disagreement={kernel: round(factor, 4) for kernel, factor in apart.items() if factor > 1},
        sources={"attention": table.source},
    )


def _between_sources(timed: Iterable[Timed]) -> dict[str, float]:
    """Return by kernel how far two times of the same work lie above and below their mean, whichever is longer."""
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for use, seconds in timed:
        found[curves.work(use)].append(seconds)
    apart: dict[str, list[float]] = defaultdict(list)
    for (kernel, *_), times in found.items():
        if len(times) > 1:
            apart[str(kernel)].append(math.sqrt(max(times) / min(times)))
    return {kernel: geometric_mean(factors) for kernel, factors in apart.items()}


def _charts(gpu: str, kernels: tuple[str, ...]) -> tuple[list[Timed], dict[str, float]]:
    """Return what bars of charts say of a kernel, whatever they call it, and by which factor each may be off."""
    timed = [one for kernel in kernels for one in curves.charts(gpu, (kernel,))]
    return timed, curves.digitised_within(gpu, timed, kernels)


def _flash_attention_2_on_hopper() -> Timings:
    """Return what H800 and H100 say: the same silicon at the same power limit."""
    charts, within = _charts("H100", ("fa2",))
    squares = [point for point in ultraattn.kernels("H800") if point.shape[1] == point.shape[2]]
    sums = curves.backward_of_sums("H100-SXM-80GB", "fa2")
    return Timings([*_timed(squares), *curves.papers("fa2"), *sums, *charts], within)


def _cudnn_on_h100() -> Timings:
    """Return what H100 says, and how much faster the newest version is on H200."""
    timed, within = _charts("H100", _CUDNN)
    timed += curves.papers("cudnn")
    newer = _ratios(curves.of_cudnn("H200"), timed).mean()
    return Timings(timed, {kernel: max(1 / ratio, within[kernel]) for kernel, ratio in newer.items()})


def _cudnn_on_b200() -> Timings:
    """Return what charts say, and how much faster the newest version is on GB200 at the same share of the peak."""
    timed, within = _charts("B200", _CUDNN)
    newer = _ratios(curves.of_cudnn("GB200"), timed).mean()
    apart = {
        kernel: max(1 / (ratio * _FASTER_THAN_B200["gb200-nvl72"]), within[kernel]) for kernel, ratio in newer.items()
    }
    return Timings([*timed, *_with_64_dimensions(timed, curves.papers("cudnn"))], apart)


def _flash_attention_4_on_b200() -> Timings:
    timed, within = _charts("B200", ("fa4",))
    like = [*curves.papers("fa4", gpu="B200/B300-class"), *_backward(curves.papers("fa3"))]
    return Timings([*timed, *_with_64_dimensions(timed, like)], within)


def _flash_attention_4_on(cluster: str) -> Timings:
    """Return what it takes on B200 at the same share of the peak, as far apart as forward passes of 128 dimensions on
    such GPUs are faster than that. No one has timed backward passes: they are taken to lie as far apart.
    """
    base, faster = shipped_profile(f"{FOLDER}/b200-flash-attention-4"), _FASTER_THAN_B200[cluster]
    ratios = _ratios(curves.papers("fa4", gpu="GB200/GB300-class"), curves.papers("fa4", gpu="B200/B300-class"), 128)
    apart = 1 / (ratios.mean()["attention_forward"] * faster)
    return Timings(
        [(use, seconds / faster) for use, seconds in _timed(base.points)], dict.fromkeys(ATTENTION_KERNELS, apart)
    )


def _flash_attention_2_on_b200() -> Timings:
    """Return what it takes on H100, times what it takes of that on B200, of which 64 dimensions are timed."""
    on_b200 = curves.papers("fa2 2.7.4", gpu="B200")
    base = shipped_profile(f"{FOLDER}/h100-flash-attention-2")
    return _by_ratio(_timed(base.points), _ratios(on_b200, curves.papers("fa2")), base.disagreement)


def _over_flash_attention_2(kernel: str, base: str, gpu: str = "A100-SXM-80GB") -> Timings:
    """Return FlashAttention-2 of a profile, times what both passes of a kernel take of its together on a GPU."""
    ours, theirs = curves.summed(gpu, kernel), curves.summed(gpu, "fa2")
    both = [
        (use._replace(kernel=name), seconds / theirs[use])
        for use, seconds in ours.items()
        for name in ATTENTION_KERNELS
    ]
    ratios = _Ratios(both)
    profile = shipped_profile(base)
    return _by_ratio(_timed(profile.points), ratios, profile.disagreement)


def _timed(points: Iterable[Point]) -> list[Timed]:
    return [(use_of(point), point.median_s) for point in points if point.kernel in ATTENTION_KERNELS]


class _Ratios:
    """How many times as long one kernel takes as another, by pass, mask, head dimension and length."""

    def __init__(self, found: Iterable[Timed]) -> None:
        self._curves: dict[tuple[str, str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for use, ratio in found:
            self._curves[use.kernel, use.variant, use.shape[-1]][use.shape[1]].append(ratio)

    def of(self, use: KernelUse) -> float:
        """Return it for a kernel: that of its pass, mask, dimension and length, or of those that are nearest."""
        near = [key for key in self._curves if key[0] == use.kernel]
        key = min(near, key=lambda key: (key[1] != use.variant, abs(math.log(key[2] / use.shape[-1])), key))
        curve = self._curves[key]
        return geometric_mean(curve[min(curve, key=lambda tokens: (abs(math.log(tokens / use.shape[1])), tokens))])

    def apart(self) -> dict[str, float]:
        """Return by kernel how far ratios lie above and below the middle between the least and the largest."""
        found = ((kernel, self._all(kernel)) for kernel in self._kernels())
        return {kernel: math.sqrt(max(each) / min(each)) for kernel, each in found}

    def mean(self) -> dict[str, float]:
        """Return it by kernel, over all shapes."""
        return {kernel: geometric_mean(self._all(kernel)) for kernel in self._kernels()}

    def _kernels(self) -> set[str]:
        return {kernel for kernel, _, _ in self._curves}

    def _all(self, kernel: str) -> list[float]:
        return [x for key, curve in self._curves.items() if key[0] == kernel for each in curve.values() for x in each]


def _ratios(ours: Iterable[Timed], theirs: Iterable[Timed], head_dim: int | None = None) -> _Ratios:
    """Return how many times as long some kernels take as others, where both do the same work, of all head dimensions
    or one.
    """
    known = {curves.work(use): seconds for use, seconds in theirs if head_dim in {None, use.shape[-1]}}
    return _Ratios((use, seconds / known[curves.work(use)]) for use, seconds in ours if curves.work(use) in known)


def _backward(timed: Iterable[Timed]) -> Iterator[Timed]:
    return (one for one in timed if one[0].kernel == "attention_backward")


def _with_64_dimensions(timed: Iterable[Timed], like: Iterable[Timed]) -> Iterator[Timed]:
    """Yield kernels of twice as many heads with half of 128 dimensions: their time, times what that makes of others at
    the same mask and length.
    """
    by_dims: dict[int, dict[tuple[str, str, int], Timed]] = {64: {}, 128: {}}
    for use, seconds in like:
        by_dims[use.shape[-1]][use.kernel, use.variant, use.shape[1]] = use, seconds
    both = by_dims[64].keys() & by_dims[128].keys()
    ratios = _Ratios((by_dims[128][key][0], by_dims[64][key][1] / by_dims[128][key][1]) for key in both)
    for use, seconds in timed:
        batch, tokens, _, heads, _, head_dim = use.shape
        narrow = (batch, tokens, heads * head_dim // 64, 64)
        band = CAUSAL if use.variant == "causal" else FULL
        yield square_attention(use.kernel == "attention_backward", narrow, band), seconds * ratios.of(use)


def _by_ratio(base: Iterable[Timed], ratios: _Ratios, apart: Mapping[str, float] | None = None) -> Timings:
    """Return kernels times their ratio, as far apart as ratios are from each other beside what they are of."""
    between = ratios.apart()
    of_base = apart or {}
    widths = {kernel: between[kernel] * of_base.get(kernel, 1.0) for kernel in between}
    return Timings([(use, seconds * ratios.of(use)) for use, seconds in base], widths)


def _named(kernel: FusedName, said: str) -> FusedAttention:
    return FusedAttention(kernel=kernel, said=said)


def _on_gb(name: str, cluster: str, load: UnderLoad) -> Table:
    return Table(
        cluster,
        _named("flash-attention-4", "FlashAttention-4, at B200's share of the peak"),
        partial(_flash_attention_4_on, cluster),
        f"as on B200 at the same share of the peak, of {name} there is no table; intervals reach to what forward "
        "passes of Dao-AILab/flash-attention PR 2605 gain from B200 to GPUs with such a peak",
        load.sustained,
        {},
    )


_OVER_FA2 = (
    "FlashAttention-2 of profile {}, times what both passes take of its together on A100 with the same mask and head "
    f"dimension and the nearest of 512 to 16K tokens: {_SUMS}"
)
TABLES: Mapping[str, Table] = {
    "a100-cutlass": Table(
        "dgx-a100",
        _named("cutlass", "cutlass of xformers, by its ratio to FlashAttention-2"),
        partial(_over_flash_attention_2, "xformers", "a100-sxm"),
        _OVER_FA2.format("a100-sxm"),
        {},
        {},
    ),
    "a100-flash-attention-1": Table(
        "dgx-a100",
        _named("flash-attention-1", "FlashAttention-1, by its ratio to FlashAttention-2"),
        partial(_over_flash_attention_2, "fa1", "a100-sxm"),
        _OVER_FA2.format("a100-sxm"),
        {},
        {},
    ),
    "h100-flash-attention-2": Table(
        "hgx-h100",
        _named("flash-attention-2", "FlashAttention-2"),
        _flash_attention_2_on_hopper,
        "both passes, causal and full, 128 dimensions: flash-attn 2.5.7 on H800, the same silicon, "
        f"oliverYoung2001/UltraAttn@b5aa10e; also {_PAPERS}, and of 64 dimensions; causal backward: {_SUMS}, less the "
        f"forward pass; fa2 of 4K to 32K tokens: {_CHARTS}; all on H100",
        NOT_AT_THE_LIMIT,
        _BLOCKS,
    ),
    "h100-cudnn": Table(
        "hgx-h100",
        _named("cudnn", "cuDNN of 2024 and 2025"),
        _cudnn_on_h100,
        f"{_PAPERS}; cudnn and sdpa of 4K to 32K tokens: {_CHARTS}; no source states the version; intervals reach to "
        "cuDNN 9.19.1 on H200",
        H100.sustained,
        {},
    ),
    "b200-flash-attention-2": Table(
        "hgx-b200",
        _named("flash-attention-2", "FlashAttention-2, by B200's ratio to H100 with 64 dimensions"),
        _flash_attention_2_on_b200,
        "FlashAttention-2 on H100, times what 2.7.4 takes of that on B200 in the same pass, full, with 64 dimensions: "
        "Dao-AILab/flash-attention issue 1589, of whose shapes it is from memory that they are the papers'",
        NOT_AT_THE_LIMIT,
        _BLOCKS,
    ),
    "b200-flash-attention-4": Table(
        "hgx-b200",
        _named("flash-attention-4", "FlashAttention-4"),
        _flash_attention_4_on_b200,
        f"both passes, causal and full, 8K to 32K tokens of 128 dimensions: {_CHARTS}; 64 dimensions by the ratio of "
        "Dao-AILab/flash-attention PR 2605 (forward; its shares of the peak imply B200) and of FlashAttention-3 on "
        "H100 (backward)",
        B200.sustained,
        {},
    ),
    "b200-cudnn": Table(
        "hgx-b200",
        _named("cudnn", "cuDNN of 2025"),
        _cudnn_on_b200,
        f"both passes, causal and full, 8K to 32K tokens of 128 dimensions, cudnn and sdpa: {_CHARTS}; 64 dimensions "
        "by cuDNN's ratio on H100; no source states the version; intervals reach to cuDNN 9.22.0 on GB200 at the same "
        "share of the peak",
        B200.sustained,
        {},
    ),
    "gb200-flash-attention-4": _on_gb("GB200", "gb200-nvl72", GB200),
    "gb300-flash-attention-4": _on_gb("GB300", "gb300-nvl72", GB300),
}
"""By name, which says the GPU and the kernel."""
