"""What tables answer, in one sentence: what techniques save, where the faster of two changes, who balances a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sim.base.units import FEW, length, number, seconds, size

Row = Mapping[str, Any]


def of_ladder(rows: Sequence[Row]) -> str:
    r"""Return what all techniques together save and cost, and which of them most.

    >>> none = {"techniques": "none", "longest": 0, "seq": 2048, "step_time_s": 1.0, "peak_hbm_bytes": 3 << 30}
    >>> more = {**none, "techniques": "+ FSDP", "longest": 4096, "step_time_s": 1.25, "peak_hbm_bytes": 2 << 30}
    >>> print(of_ladder([none, more]).replace("; ", ";\n"))
    With FSDP contexts up to 4K fit, without it none;
    at 2K a GPU holds 2 GiB instead of 3 GiB, and a step takes 1.25 s instead of 1 s
    """
    rungs = [row for row in rows if not row["techniques"].startswith("all")]
    none, *on = rungs
    if not on:
        return f"Without techniques {_contexts(none)} and a step takes {seconds(none['step_time_s'], FEW)}"
    every = {1: _name(on[0]), 2: "both techniques"}.get(len(on), f"all {len(on)} techniques")
    last = on[-1]
    fits = f"With {every} {_contexts(last)}, without {'it' if len(on) == 1 else 'them'} {_upto(none)}"
    held = f"a GPU holds {size(last['peak_hbm_bytes'], FEW)} instead of {size(none['peak_hbm_bytes'], FEW)}"
    takes = f"a step takes {seconds(last['step_time_s'], FEW)} instead of {seconds(none['step_time_s'], FEW)}"
    said = f"{fits}; at {length(last['seq'])} {held}, and {takes}"
    return said if len(on) == 1 else said + _most(rungs)


def _contexts(row: Row) -> str:
    return f"contexts {_upto(row)} fit" if row["longest"] else "no context fits"


def _upto(row: Row) -> str:
    return f"up to {length(row['longest'])}" if row["longest"] else "none"


def _most(rungs: Sequence[Row]) -> str:
    """Return which technique saves most memory when it is switched on after those before it, and which costs most."""
    steps = [*pairwise(rungs)]
    before, saves = max(steps, key=lambda step: step[0]["peak_hbm_bytes"] - step[1]["peak_hbm_bytes"])
    saved = before["peak_hbm_bytes"] - saves["peak_hbm_bytes"]
    said = [f"{_name(saves)} saves most, {size(saved, FEW)}"] if saved > 0 else []
    before, costs = max(steps, key=lambda step: step[1]["step_time_s"] - step[0]["step_time_s"])
    cost_s = costs["step_time_s"] - before["step_time_s"]
    again = f"and {_name(costs)}" if costs is not saves or not said else "and"
    said += [f"{again if said else _name(costs)} costs most, {seconds(cost_s, FEW)}"] if cost_s > 0 else []
    return f"; {', '.join(said)}" if said else ""


def _name(row: Row) -> str:
    return str(row["techniques"]).removeprefix("+ ")


def of_crossings(
    key: str, ends: tuple[float, float], names: Mapping[str, str], rows: Sequence[Row], points: Sequence[Row]
) -> str:
    """Return which of two, a and b by their ``names``, is faster along a key between two values, and where that
    changes, as rows and points of ``longstep.crossover`` say it.

    >>> points = [{"value": 1024 * n, "a_s": 1.0, "b_s": 3 / n} for n in (1, 2, 4)]
    >>> last = {"value": None, "low": None, "high": None, "below": "b", "above": "b"}
    >>> change = {**last, "value": 3072, "low": 2048, "high": 4096, "below": "a"}
    >>> names = {"a": "ring", "b": "ulysses"}
    >>> print(of_crossings("seq", (1024, 4096), names, [change, last], points))
    Ring is faster than ulysses up to 3K (2K to 4K), ulysses from there to 4K
    >>> print(of_crossings("seq", (4096, 4096), names, [last], points))
    Ulysses is faster than ring from 4K to 4K: ring takes 1.33 times as long
    """

    def shown(value: float) -> str:
        return length(round(value)) if key == "seq" else f"{value:.3g}"

    of = "" if key == "seq" else f"{key} "
    begin, parts = ends[0], list[str]()
    for row in rows:
        is_last = row["value"] is None
        end = ends[1] if is_last else row["value"]
        span = f"from there {'to' if is_last else 'up to'} {shown(end)}"
        if not parts:
            span = f"from {of}{shown(begin)} to {shown(end)}" if is_last else f"up to {of}{shown(end)}"
        if not is_last:
            known = [shown(row[name]) for name in ("low", "high") if row[name] is not None]
            span += (
                ""
                if len({*known, shown(end)}) == 1 and known
                else f" ({' to '.join(known) or 'how near is not known'})"
            )
        inside = [point for point in points if begin <= point["value"] <= end]
        parts.append(_wins(row["below"], names, span, inside, is_first=not parts, is_only=is_last and not parts))
        begin = end
    said = ", ".join(parts)
    return said[0].upper() + said[1:]


def _wins(
    who: str, names: Mapping[str, str], span: str, points: Sequence[Row], *, is_first: bool, is_only: bool
) -> str:
    """Return who wins in a part of the range, by the points that were played there."""
    if not who:
        return f"neither can be played and fits {span}"
    slow = "b" if who == "a" else "a"
    ratios = [number(one[f"{slow}_s"] / one[f"{who}_s"], FEW) for one in points if one["a_s"] and one["b_s"]]
    if not ratios:
        return f"{names[who]} alone can be played and fits {span}"
    if not is_first:
        return f"{names[who]} {span}"
    least, most = min(ratios, key=float), max(ratios, key=float)
    times = f": {names[slow]} takes {least if least == most else f'{least} to {most}'} times as long"
    return f"{names[who]} is faster than {names[slow]} {span}{times if is_only else ''}"


def of_balance(rows: Sequence[Row], own: str, bound: str, batches: int = 1) -> str:
    r"""Return which planner attends a batch fastest, how near it is to the bound, and how far others are behind: first
    of all a layout of your ``own``. Rows are as ``longstep.balance`` gives them, or medians of several ``batches``;
    those that are not simulated count where none is.

    >>> row = {"planner": "zigzag", "attention_s": 2.0, "skew": 1.5, "error": ""}
    >>> dcp, bound = {**row, "planner": "dcp", "attention_s": 1.5}, {**row, "planner": "bound", "attention_s": 1.25}
    >>> print(of_balance([row, dcp, bound], "own", "bound").replace("; ", ";\n"))
    Dcp attends this batch fastest, in 1.5 s, 1.2 times the lower bound, its slowest rank 1.50 times the mean;
    zigzag takes 1.33 times as long
    """
    these = "this batch" if batches == 1 else f"{batches} batches"
    planned = [row for row in rows if not row["error"] and row["planner"] != bound]
    if not planned:
        return f"No planner takes {these}"
    figure = "attention_s" if any(row["attention_s"] is not None for row in planned) else "slowest_s"
    first, *others = sorted((row for row in planned if row[figure] is not None), key=lambda row: float(row[figure]))
    least = next((row[figure] for row in rows if row["planner"] == bound), None)
    name = first["planner"]
    said = f"{name[0].upper()}{name[1:]} attends {these} fastest, in {seconds(first[figure], FEW)}"
    said += "" if batches == 1 else " by the median"
    said += "" if figure == "attention_s" else " of kernels"
    said += f", {number(first[figure] / least, FEW)} times the lower bound" if least else ""
    said += f", its slowest rank {first['skew']:.2f} times the mean"
    others = [row for row in others if row["planner"] == own] or others[:1]
    behind = [f"{row['planner']} takes {number(row[figure] / first[figure], FEW)} times as long" for row in others]
    return "; ".join([said, *behind])


def of_packings(rows: Sequence[Row]) -> str:
    r"""Return which packing of documents into micro-batches trains fastest, what uneven ones cost its step, and how far
    the next other packer is behind. Rows are as ``balance_micro_batches`` gives them.

    >>> row = {"packer": "wlb-llm", "tokens_per_s_per_gpu": 900.0, "imbalance": 1.02, "uneven": 0.01, "error": ""}
    >>> other = {**row, "packer": "concatenated", "tokens_per_s_per_gpu": 600.0, "imbalance": 1.5, "uneven": 0.13}
    >>> print(of_packings([row, other]).replace("; ", ";\n").replace("of the", "of\nthe"))
    Wlb-llm trains fastest, 900 tokens/s/GPU: its heaviest micro-batch takes 1.02 times the mean, which costs 1.0 % of
    the step;
    concatenated trains 0.67 times as fast: its heaviest micro-batch takes 1.50 times the mean, which costs 13.0 % of
    the step
    """
    first, *others = sorted(
        (row for row in rows if not row["error"]), key=lambda row: -float(row["tokens_per_s_per_gpu"])
    )
    name, rate = first["packer"], float(first["tokens_per_s_per_gpu"])
    said = [f"{name[0].upper()}{name[1:]} trains fastest, {number(rate, FEW)} tokens/s/GPU: {_heaviest(first)}"]
    behind = [row for row in others if row["packer"] != name][:1]
    said += [
        f"{row['packer']} trains {row['tokens_per_s_per_gpu'] / rate:.2f} times as fast: {_heaviest(row)}"
        for row in behind
    ]
    return "; ".join(said)


def _heaviest(row: Row) -> str:
    return (
        f"its heaviest micro-batch takes {row['imbalance']:.2f} times the mean, which costs "
        f"{100 * row['uneven']:.1f} % of the step"
    )


def of_roofline(gpu: str, flops_per_byte: float, rows: Sequence[Row]) -> str:
    """Return what a GPU balances, how many kernels of a layer are bound by its FLOPs at the longest length, and how
    much of the peak attention and matrix products reach. Rows are as ``longstep.roofline`` gives them, the first of
    attention being of what is executed.
    """
    executed = next(row["attention"] for row in rows if row["attention"])
    longest = max(row["seq"] for row in rows)
    own = [row for row in rows if row["seq"] == longest and row["attention"] in {"", executed}]
    bound = sum(row["bound"] == "compute" for row in own)
    reach = [_reach("attention", [row for row in own if row["attention"]])]
    reach.append(_reach("matrix products", [row for row in own if row["kernel"] == "gemm"]))
    does = f"{gpu} does {flops_per_byte:.0f} FLOPs in the time of one byte of its memory"
    kernels = (
        f"{bound} of the {len(own)} kernels of a layer at {length(longest)} do more for a byte, so compute bounds them"
    )
    return f"{does}; {kernels}; of their roof {' and '.join(reach)}"


def _reach(name: str, rows: Sequence[Row]) -> str:
    shares = [f"{100 * row['share_of_roof']:.0f}" for row in rows]
    least, most = min(shares, key=float), max(shares, key=float)
    return f"{name} reach{'es' if name == 'attention' else ''} {least if least == most else f'{least} to {most}'} %"
