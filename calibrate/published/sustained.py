"""What kernels take under seconds of load over what they take in short runs, and how that follows the power limit.

Ratios of rates over matched shapes: median, 10th and 90th percentile, widened where sources differ. aiconfigurator has
timed the same shapes in runs of about 13 kernels and in runs of at least 1 s, with power.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from calibrate.published.reading import rows
from sim.words.profile import Held, Longer, PowerLaw, Sustained

_AICONFIGURATOR = "ai-dynamo/aiconfigurator@095f58a, the same shapes in runs of about 13 kernels and of at least 1 s"
_SIMUMAX = "MooreThreads/SimuMax@4dcaae5 configs/system/b200_bf16_ceperm.json and a100_pcie.json"


class UnderLoad(NamedTuple):
    """What a profile says of load, and where it has it from."""

    sustained: dict[str, Sustained]
    power: PowerLaw
    sources: dict[str, str]
    flat: bool = False
    """Whether matrix products get as much for seconds as in short runs, so that no rate held is below their points'."""


def _longer(ratio: float, low: float, high: float) -> Longer:
    """Return how many times as long a kernel takes whose rate is ``ratio`` of another, ``low`` and ``high`` of nine
    shapes of ten.
    """
    return Longer(longer=round(1 / ratio, 4), low=round(1 / high, 4), high=round(1 / low, 4))


FORMS = {
    "gemm nn": _longer(1.0, 1.0, 1.0),
    "gemm nt": _longer(1.0, 0.93, 1.06),
    "gemm tn": _longer(0.975, 0.92, 1.07),
    "gemm tn into fp32": _longer(0.94, 0.86, 1.03),
    "gemm tn accumulate into fp32": _longer(0.94, 0.86, 1.03),
}
"""Rates of a linear layer's matrix products over that of the forward pass, on A100 PCIe and B200: the sum in fp32 is
traffic that the kernel waits for, so it holds in short runs too."""
FORMS_SOURCE = f"{_SIMUMAX}: 79 and 40 layers, over the forward pass of the same shape; H100 and H200 have no table"


_LEAST_SIDE = 1024
"""Rows, columns and depth of a product from which on it is the tensor cores that a kernel keeps busy."""
HELD_SOURCE = (
    "rate held: aiconfigurator@095f58a, matrix products of 10 ms and more of random operands, 13 of which take 0.13 s: "
    "median and deciles. Others: GB200 in runs of 1 s 1427 of 1435 TFLOP/s; H200 over 16 s 705 of 693 (PyTorch PR "
    "156203); H100 711 of 719 (napkin-math-gpu); B200 near 750 W 1105 (SimuMax), 1109 by the power law"
)


def held(system: str, peak_flops_per_s: float, from_s: float) -> Held:
    """Return what matrix products of so many seconds and more get of a GPU's peak, by the name of its system in
    aiconfigurator's table.
    """
    found = [
        float(row["tflops"]) * 1e12 / peak_flops_per_s
        for row in rows("gemm_bf16")
        if row["system"] == system
        and float(row["latency_us"]) >= from_s * 1e6
        and min(int(row[side]) for side in "mnk") >= _LEAST_SIDE
    ]
    low, *_, high = statistics.quantiles(found, n=10)
    return Held(share=round(statistics.median(found), 4), low=round(low, 4), high=round(high, 4))


def _sustained(ratio: float, low: float, high: float) -> Sustained:
    found = _longer(ratio, low, high)
    return Sustained(longer=found.longer, low=found.low, high=found.high)


def _attention(forward: tuple[float, float, float], backward: tuple[float, float, float], reached_s: float,
               full_s: float) -> dict[str, Sustained]:  # fmt: skip
    """Return both passes: kernels of up to 10 ms are slower under load, longer ones lower the clock themselves."""
    found = {}
    for kernel, ratios in (("attention_forward", forward), ("attention_backward", backward)):
        of_rates = _longer(*ratios)
        found[kernel] = Sustained(
            longer=of_rates.longer, low=of_rates.low, high=of_rates.high, rises_s=(reached_s, full_s),
            falls_s=(3e-3, 10e-3),
        )  # fmt: skip
    return found


_FA3 = _attention((0.94, 0.89, 1.0), (0.94, 0.87, 1.0), 0.3e-3, 1e-3)
NOT_AT_THE_LIMIT = _attention((1.0, 0.89, 1.0), (1.0, 0.87, 1.0), 0.3e-3, 1e-3)
"""Of kernels with half the FLOP/s of FlashAttention-3 on the same GPU: taken not to reach its power limit, and at the
upper end of intervals to be slowed as much."""
_FA3_SOURCE = (
    f"attention forward: {_AICONFIGURATOR}: FlashAttention-3 on H200 at 690 W, 485 shapes of 128 dimensions; backward: "
    "taken to be as forward, there is no table"
)
_NO_LAW_SOURCE = (
    "as B200 between 750 and 1000 W, within what physics allows: 1/3 where voltage follows the clock, 1 where the "
    "energy of an operation stays; not measured on this GPU"
)
H200 = UnderLoad(
    sustained={"gemm": _sustained(0.87, 0.82, 0.94)} | _FA3,
    power=PowerLaw(exponent=0.67, low=0.33, high=1.0, from_w=700, to_w=700),
    sources={
        "sustained": f"gemm: {_AICONFIGURATOR}: 4900 shapes at 691 W; {_FA3_SOURCE}",
        "power": _NO_LAW_SOURCE,
    },
)
H100 = UnderLoad(
    sustained={"gemm": _sustained(0.91, 0.85, 0.96)} | _FA3,
    power=PowerLaw(exponent=0.67, low=0.33, high=1.0, from_w=700, to_w=700),
    sources={
        "sustained": "gemm: no shapes in both modes; short runs of 0.3 to 1 ms have 777 TFLOP/s, of over 10 ms 722 in "
        "the same table, 72 kernels in a row 690 to 696 (SGLang's set of aiconfigurator), napkin-math-gpu 711 held; "
        f"attention as on H200, the same silicon at the same limit: {_FA3_SOURCE}",
        "power": _NO_LAW_SOURCE,
    },
)
B200 = UnderLoad(
    sustained={"gemm": _sustained(0.87, 0.83, 0.95)} | _attention((0.93, 0.89, 1.0), (0.93, 0.87, 1.0), 0.1e-3, 0.3e-3),
    power=PowerLaw(exponent=0.65, low=0.41, high=0.82, from_w=750, to_w=1000),
    sources={
        "sustained": f"gemm: {_AICONFIGURATOR}: 731 shapes of random operands at up to 995 W; attention forward: the "
        "same, TensorRT-LLM and FlashInfer, 2284 shapes at 985 W; backward: as forward, widened by cuDNN's 0.87 to "
        f"0.95 over 2 s ({_SIMUMAX})",
        "power": f"gemm: 1090 to 1110 TFLOP/s near 750 W ({_SIMUMAX}, whose limit is inferred; "
        "facebookexperimental/triton at 750 W), 1250 to 1380 at 1000 W",
    },
)
GB200 = UnderLoad(
    sustained={"gemm": _sustained(0.83, 0.78, 0.94)} | _attention((0.93, 0.88, 1.0), (0.93, 0.87, 1.0), 0.3e-3, 1e-3),
    power=PowerLaw(exponent=0.65, low=0.33, high=1.0, from_w=1200, to_w=1200),
    sources={
        "sustained": f"gemm: {_AICONFIGURATOR}: 4487 shapes of random operands at 1170 W; attention forward: the same, "
        "TensorRT-LLM, 1400 shapes; backward: as B200's",
        "power": _NO_LAW_SOURCE,
    },
)
GB300 = GB200._replace(
    power=PowerLaw(exponent=1.09, low=0.93, high=1.22, from_w=500, to_w=1400),
    sources={
        "sustained": f"as GB200, of this GPU there is no table; {GB200.sources['sustained']}",
        "power": "gemm: 617 TFLOP/s at 500 W, 1600 to 2174 and on average 1887 at 1400 W, facebookexperimental/triton "
        "PR 2023: over the whole range; B200 follows its limit less between 750 and 1000 W",
    },
)
A100 = UnderLoad(
    sustained={"gemm": _sustained(0.98, 0.91, 1.0)},
    power=PowerLaw(exponent=0.18, low=0.07, high=0.33, from_w=300, to_w=400),
    sources={
        "sustained": "gemm: the table of short runs is flat from 0.3 to 100 ms, 10000 warm-ups give 0.91 to 1.01 of it "
        "(Azure/AI-benchmarking-guide@8fd0c6e); of attention there is no table, it stays as in short runs",
        "power": f"gemm: A100 PCIe at 300 W has 0.93 (0.91 to 0.96) of this table's rates ({_SIMUMAX})",
    },
    flat=True,
)
