"""What a run of the user's measured, and whether its figures agree with each other."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sim.base.errors import InputError
from sim.diagnose.kernel_names import WorkKind
from sim.schedule.model.layer import gemm_flops
from sim.schedule.write.attention import attention_flops
from sim.setup.configuration import Configuration
from sim.setup.prediction import Prediction

_SAME = 0.1
"""Figures of one run that are as near as this say the same: averages are over different steps."""
_SAME_MFU = 0.03
"""As near as an MFU has to be to a way of counting FLOPs, of which some differ by 10 % only."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: at least one figure. The others are None.

    >>> Measured(tokens_per_s=8192.0).step_s(tokens=65536, gpus=8)
    8.0
    """

    step_time_s: float | None = None
    tokens_per_s: float | None = None
    """Of the whole job."""
    tokens_per_s_per_gpu: float | None = None
    memory_bytes: float | None = None
    """Peak of one GPU: by the allocator, or by nvidia-smi."""
    mfu: float | None = None
    """As it was printed, as a share."""
    rank_s: tuple[float, ...] = ()
    """Seconds of kernels in a step, rank by rank."""
    kind_s: dict[WorkKind, float] = {}
    """Seconds of a step by kind of work, mean over ranks: of traces (``sim.diagnose.traced``)."""
    loops_apart: bool = False
    """Whether ``kind_s`` has each kernel of a loop over tiles of an MLP by itself, or the loop as products."""
    step_error: float = 0.0
    """Standard error of the step time, in logarithm, by how steps of a trace scatter."""
    rank_error: float = 0.0
    """That of how far a rank is from the others."""

    def require(self) -> None:
        """Raise InputError where nothing was measured, or what can be no measurement."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        ranks = fields.pop("rank_s")
        for of_traces in ("kind_s", "loops_apart", "step_error", "rank_error"):
            fields.pop(of_traces)
        if not ranks and all(value is None for value in fields.values()):
            raise InputError("nothing was measured: give `step_time`, `tokens_per_s`, `memory`, `mfu` or `trace`")
        for name, value in fields.items():
            given = name.removesuffix("_s") if name == "step_time_s" else name.removesuffix("_bytes")
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError(f"`{given}` {value}: expected a number above 0")
        if self.mfu is not None and self.mfu > 2:
            raise InputError(f"`mfu` {self.mfu:g}: expected a share such as 0.41, or 41%")
        if any(not 0 < value < math.inf for value in ranks):
            raise InputError(f"`rank_times` {min(ranks):g}: expected seconds above 0 of every rank")

    def step_s(self, tokens: int, gpus: int) -> float | None:
        """Return the step time: as measured, or what a rate of so many tokens a step makes it."""
        if self.step_time_s is not None:
            return self.step_time_s
        if self.tokens_per_s is not None:
            return tokens / self.tokens_per_s
        return None if self.tokens_per_s_per_gpu is None else tokens / (self.tokens_per_s_per_gpu * gpus)

    def by_mfu_s(self, base: Prediction) -> float | None:
        """Return the step time that a measured MFU means, if nothing else tells a time. FLOPs are counted as the field
        does.

        Raises InputError where nothing else was measured and there is no peak that it could be a share of.
        """
        own = base.figures.mfu
        if self.mfu is not None and own is not None:
            return own * base.step_time_s / self.mfu
        if self.mfu is not None and self.memory_bytes is None and not self.rank_s:
            raise InputError("`mfu` alone tells no time of this step: give `step_time` or `tokens_per_s`")
        return None


def findings_of_figures(measured: Measured, step_s: float | None, base: Prediction, found: Configuration) -> list[str]:
    """Return where rates, times and MFU of a run contradict each other, and by which way of counting they would not."""
    if step_s is None:
        return []
    mfu = measured.mfu or 0.0
    above = [f"MFU {100 * mfu:.1f} %: nothing computes more than its peak"] if mfu > 1 else []
    return [*above, *_rates(measured, step_s, found), *_mfu(measured, step_s, base, found)]


def _rates(measured: Measured, step_s: float, found: Configuration) -> list[str]:
    """Return how tokens/s were counted, if a step time stands beside them."""
    size, cp = found.mesh.size, found.mesh.sharing
    of_job = found.mesh.dp * found.workload.num_real_tokens / step_s
    said = []
    for value, meant, name in (
        (measured.tokens_per_s, of_job, "tokens/s"),
        (measured.tokens_per_s_per_gpu, of_job / size, "tokens/s per GPU"),
    ):
        if value is None or abs(math.log(value / meant)) < _SAME:
            continue
        ways = {
            "it is counted per GPU": of_job / size,
            "it is counted over the job": of_job,
            "each rank counts the tokens of its whole sequence: context parallelism is not divided out": of_job * cp,
            "only one replica's tokens are counted": of_job / found.mesh.dp,
            "only one rank's shard is counted for the job": of_job / (found.mesh.dp * cp),
        }
        fits = [way for way, rate in ways.items() if rate != meant and abs(math.log(value / rate)) < _SAME]
        why = "; or ".join(dict.fromkeys(fits)) or f"{value / meant:.3g} times that: length, batch or GPUs are not so"
        said.append(f"{name} {value:.4g} and the step time do not agree ({meant:.4g} by the configuration): {why}")
    return said


def _mfu(measured: Measured, step_s: float, base: Prediction, found: Configuration) -> list[str]:
    """Return how FLOPs were counted for an MFU, if it is not as the field counts them."""
    own = base.figures.mfu
    if measured.mfu is None or own is None:
        return []
    mfu = own * base.step_time_s / step_s
    ways = {name: mfu * factor for name, factor in _counted(found).items()}
    training = base.figures.training
    if training and training.hfu:
        ways["what checkpointing computes again is counted (HFU)"] = training.hfu * base.step_time_s / step_s
    if measured.step_s(1, 1) is None:
        other = "; ".join(f"{step_s * value / mfu:.4g} s where {way}" for way, value in ways.items())
        return [f"the step time is what MFU {100 * measured.mfu:.1f} % means by the mask; or it is {other}"]
    if abs(math.log(measured.mfu / mfu)) < _SAME_MFU:
        return []
    fits = [f"{way} ({100 * value:.1f} %)" for way, value in ways.items()
            if abs(math.log(measured.mfu / value)) < _SAME_MFU]  # fmt: skip
    why = "; or ".join(fits) or "no usual way of counting makes it that: see the peak that it is divided by"
    return [f"MFU {100 * measured.mfu:.1f} % and the time do not agree ({100 * mfu:.1f} % by the mask): {why}"]


def _counted(found: Configuration) -> dict[str, float]:
    """Return by how much other ways of counting FLOPs make an MFU larger or smaller."""
    workload = found.workload
    alone = msgspec.structs.replace(workload, scope="attention", layers=1, passes="forward")
    masked = sum(attention_flops(one) * count for one, count in alone.kinds(workload.layers))
    full = msgspec.structs.replace(
        alone, mask="full", window=None, documents=msgspec.UNSET, block_mask=msgspec.UNSET, pattern=msgspec.UNSET,
        padding=0,
    )  # fmt: skip
    whole = workload.layers * attention_flops(full)
    matrices = gemm_flops(msgspec.structs.replace(workload, passes="both")) / 3
    meant = masked + matrices
    ways = {
        "the mask is counted as full": (whole + matrices) / meant,
        "the mask is counted as full, and divided by two": (whole / 2 + matrices) / meant,
        "attention is not counted (6 N)": matrices / meant,
        "the peak is that of sparse products": 0.5,
        "the peak is that of sparse products, the mask is counted as full": (whole + matrices) / meant / 2,
    }
    return {name: factor for name, factor in ways.items() if factor and abs(math.log(factor)) > _SAME_MFU}
