"""MLPs in tiles of tokens: a loop is one op, whatever its tiles, and makes what the equations make that it replaces."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch

from runtime.execution.verify import BOUNDS, output_errors
from runtime.execution.virtual import execute_virtual
from sim.accounts.memory import walks
from sim.base.errors import InputError
from sim.engine.costs.cost import CostModel
from sim.engine.costs.phases import Flow
from sim.engine.play.jitter import Jitter
from sim.schedule.derive.kernels import kernel_use
from sim.schedule.derive.tiles import tiles
from sim.schedule.ir.ops import Gemm, Kernel, Op, TiledMlp, TiledMlpBackward
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.model.layer import gemm_flops
from sim.schedule.model.tiling import block_in_tiles
from sim.schedule.proof.check import check
from sim.words.profile import load_profile
from sim.words.workload import Workload
from tests.engine.play.equality import Cell, require_equal_engines
from tests.engine.play.test_engines import requires_compiler
from tests.helpers import by_tier, make_model, slow_but
from tests.schedule.model.test_step import is_exact, make_step, replaced, step
from tests.schedule.proof.test_check_catches import refuses
from topology.cluster import Cluster, load_cluster


def narrow(**fields: Any) -> Workload:
    """Of so few features that 40 tokens of a sequence on 2 ranks are three tiles by ALST's rule, and 20 on 4 two."""
    model = msgspec.structs.replace(make_model(4, 4, head_dim=4), vocab_size=64)
    return step(**({"model": model, "seq": 80} | fields))


@pytest.mark.parametrize("name", by_tier({"ulysses"}, {"fpdt"}, SCHEDULES))
@pytest.mark.parametrize("checkpoint", slow_but({"full"}, ["full", "none"]))
def test_every_schedule_is_exact(name: str, checkpoint: str) -> None:
    ranks = 1 if name == "single" else 4
    checked = is_exact(name, ranks, narrow(batch=2), mlp="tiled", checkpoint=checkpoint)
    (op, *_) = of_kind(checked.schedule, TiledMlpBackward)
    assert len(tiles(op, checked.schedule.program(0))) > 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "attention", "loss": "chunked"},
        {"checkpoint": "x+out+h2", "activations": "save-on-cpu"},
        {"mlp": "mini", "zero_stage": 0, "dp": 2},
        {"optimiser": "host", "activations": "host"},
    ],
)
def test_with_other_techniques(options: dict[str, Any]) -> None:
    is_exact("ulysses", 4, narrow(), **({"mlp": "tiled"} | options))


@pytest.mark.sweep
def test_all_ranks_on_one_device() -> None:
    folded = check(on_one_device(make_step("zigzag", 2, narrow(), mlp="tiled")))
    errors = output_errors(folded, execute_virtual(folded, torch.device("cpu")))
    assert max(errors.values()) <= BOUNDS["fp64"]


def test_a_written_schedule_comes_back() -> None:
    schedule = make_step("ring", 2, narrow(), mlp="tiled").schedule
    assert check(Schedule.from_json(schedule.to_json())).schedule.hash == schedule.hash


@pytest.mark.sweep
def test_narrower_data_types() -> None:
    """In bf16, in which gradients of weights are summed over tiles, no farther off than an MLP that is whole."""
    is_exact("zigzag", 2, narrow(dtype="fp32"), mlp="tiled")
    worst = []
    for mlp in ("whole", "tiled"):
        checked = make_step("zigzag", 2, narrow(dtype="bf16"), mlp=mlp)
        worst.append(max(output_errors(checked, execute_virtual(checked, torch.device("cpu"))).values()))
    assert worst[1] <= 1.05 * worst[0]


def test_tiles_by_their_papers() -> None:
    """ALST: 655,360 tokens by 4096 features are 160 tiles; of 10,000 tokens three, the largest of 3334. MST: 4096
    tokens of all sequences, and never fewer than 1024 of each.
    """
    model = msgspec.structs.replace(make_model(), embed_dim=4096)

    def tile(mlp: Any, tokens: int, batch: int = 1) -> int:
        after = block_in_tiles(mlp, step(model=model, batch=batch), tokens).forward.after
        (loop,) = (one for one in after if one.kind is TiledMlp)
        return dict(loop.variant)["tile"]

    assert [tile("tiled", tokens) for tokens in (655_360, 10_000, 4096, 100)] == [4096, 3334, 4096, 100]
    assert tile("tiled", 10_000, batch=2) == 6667
    assert [tile("mini", 655_360, batch) for batch in (1, 2, 4, 8)] == [4096, 4096, 4096, 8192]


def test_a_program_does_not_grow_with_its_tiles() -> None:
    counts = [make_step("ring", 2, narrow(seq=seq), mlp="tiled").schedule.program(0).num_ops for seq in (32, 640)]
    assert counts[0] == counts[1]


@pytest.mark.sweep
def test_tiles_are_computed_again() -> None:
    """With full checkpointing forward runs three times, as a function that saves its input once it has run is run again
    with the layer; in mini-sequences twice. A backward pass is two products for each weight.
    """
    runs = {
        ("tiled", "full"): 3, ("mini", "full"): 2, ("tiled", "none"): 2, ("mini", "none"): 2, ("whole", "none"): 1,
        ("tiled", "x+h1+q+k+v+out+middle+h2"): 2,
    }  # fmt: skip
    workload = narrow()
    weights, tokens = 3 * 16 * 64 * workload.layers, workload.seq
    for (mlp, checkpoint), times in runs.items():
        schedule = make_step("ring", 2, workload, mlp=mlp, checkpoint=checkpoint).schedule
        outside = 2 * 4 * 16 * 16 * workload.layers * tokens if checkpoint == "full" else 0
        assert schedule.header.claims is not None
        again = schedule.header.claims.gemm_flops - gemm_flops(workload)
        assert again == (times - 1) * 2 * weights * tokens + outside


def test_nothing_as_wide_as_the_feed_forward_dimension_is_saved() -> None:
    """gate, up and act of 40 tokens of two layers, 64 wide, in fp64."""
    peaks = [
        walks(make_step("ring", 2, narrow(), mlp=mlp, checkpoint="none"))[0].buffer_peak_bytes
        for mlp in ("whole", "tiled")
    ]
    assert peaks[0] - peaks[1] >= 2 * 3 * 40 * 64 * 8


def test_what_a_loop_costs_by_hand() -> None:
    """Of 40 tokens 14, 14 and 12. Forward three products and SwiGLU each; backward nine products, SwiGLU and its
    backward pass, and from the second tile on three sums of gradients. At datasheet rates each takes its FLOPs or its
    bytes, and the host issues each.
    """
    program = make_step("ring", 2, narrow(dtype="bf16"), mlp="tiled").schedule.program(0)
    cluster = Cluster(load_cluster("hgx-h100"))
    cost = CostModel(cluster, None)
    flops_per_s, bytes_per_s = cluster.peak_flops_per_s(0, "bf16"), cluster.spec.hbm.bytes_per_s
    for kind, issued in ((TiledMlp, 3 * 4), (TiledMlpBackward, 3 * 11 + 2 * 3)):
        op = next(op for op in program.ops if isinstance(op, kind))
        use, seconds, flops = kernel_use(op, program), 0.0, 0
        for rows, first in ((14, True), (14, False), (12, False)):
            x, f, w = 2 * rows * 16, 2 * rows * 64, 2 * 16 * 64  # bytes
            product, of_product = x + w + f, 2 * rows * 16 * 64
            kernels = [(of_product, product)] * 3 + [(5 * rows * 64, 3 * f)]
            if kind is TiledMlpBackward:
                added = (of_product, product + x)  # to dx, which is read, too
                kernels += [(of_product, product)] * 5 + [added, (12 * rows * 64, 5 * f)]
                kernels += [] if first else [(16 * 64, 3 * w)] * 3
            seconds += sum(max(work / flops_per_s, nbytes / bytes_per_s) for work, nbytes in kernels)
            flops += sum(work for work, _ in kernels)
        assert use.flops == flops
        (flow,) = cost.kernel(0, use)
        assert isinstance(flow, Flow)
        assert flow.seconds == pytest.approx(seconds)
        assert cost.issue_s(op, use) == pytest.approx(issued * cluster.spec.gpu.launch_s)


@requires_compiler
@pytest.mark.sweep
def test_both_engines_give_it_the_same_times() -> None:
    """With noise, on a GPU with a profile and on a host that runs kernels in its thread."""
    checked = make_step("zigzag", 2, narrow(dtype="bf16"), mlp="tiled")
    require_equal_engines(Cell(checked, Cluster(load_cluster("hgx-h100")), load_profile("h100-sxm"), Jitter(0.1, 3)))
    checked = make_step("zigzag", 2, narrow(dtype="fp32"), mlp="tiled")
    require_equal_engines(Cell(checked, Cluster(load_cluster("host")), None, Jitter(0.1, 3)))


def test_a_loop_of_one_tile_costs_what_its_kernels_cost() -> None:
    def kernels(mlp: str) -> Counter[Any]:
        program = make_step("single", 1, narrow(seq=16), mlp=mlp).schedule.program(0)
        uses = [kernel_use(op, program) for op in program.ops if isinstance(op, Kernel)]
        found: Counter[Any] = Counter()
        for use in uses:
            for kernel, times in use.each:
                found[kernel] += times
        return found

    whole, tiled = kernels("whole"), kernels("tiled")
    again = tiled - whole
    assert not whole - tiled, "all kernels of the whole MLP are there"
    assert sum(again.values()) == 2 * (1 + 4), "of each layer the last product with the layer, and all in backward"


def of_kind(schedule: Schedule, kind: type[Op]) -> list[Any]:
    return [op for op in schedule.program(0).ops if isinstance(op, kind)]


@pytest.mark.sweep
def test_what_is_wrong_is_refused() -> None:
    schedule = make_step("ring", 2, narrow(), mlp="tiled").schedule
    forward, backward = of_kind(schedule, TiledMlp)[0], of_kind(schedule, TiledMlpBackward)
    products = of_kind(schedule, Gemm)
    refuses(replaced(schedule, TiledMlp, tile=0), "has tiles of 0 tokens: allowed is 1 or more")
    refuses(replaced(schedule, TiledMlp, w_gate=forward.w_up, w_up=forward.w_gate), "SwiGlu of up of layer 0, gate")
    refuses(replaced(schedule, TiledMlp, w_down=forward.w_up), "of shape|takes")
    refuses(replaced(schedule, TiledMlp, x=products[0].a), "Gemm form=nn of h1 of layer 0, w_gate of layer 0 is no eq")
    last = backward[0]
    swapped = {"dw_gate": last.dw_up, "dw_up": last.dw_gate}
    refuses(replaced(schedule, TiledMlpBackward, **swapped), "dw_up|dw_gate")
    refuses(replaced(schedule, TiledMlpBackward, x=last.dout), "is no equation of the layer")
    kept = make_step("ring", 2, narrow(), mlp="tiled", zero_stage=0).schedule
    of_another = of_kind(kept, TiledMlpBackward)[0].w_down
    refuses(replaced(kept, TiledMlpBackward, w_down=of_another), "Gemm form=nn of act of layer 0, w_down of layer 1 is")


def test_a_gradient_that_is_made_twice() -> None:
    schedule = make_step("ring", 2, narrow(layers=1), mlp="tiled").schedule

    def program(rank: int) -> Any:
        found = schedule.program(rank)
        at = next(number for number, op in enumerate(found.ops) if isinstance(op, TiledMlpBackward))
        return found.replace(ops=(*found.ops[: at + 1], *found.ops[at:]))

    refuses(Schedule(schedule.header, program), "FLOPs, but")


def test_what_there_is_not_cannot_be_kept() -> None:
    with pytest.raises(InputError, match="checkpoint=x.gate: 'gate' is none of the tensors .* v, out, middle, h2$"):
        make_step("ring", 2, narrow(), mlp="tiled", checkpoint="x+gate")


def test_it_is_of_steps_only() -> None:
    with pytest.raises(InputError, match="schedule.mlp=tiled is of training steps: set `scope` step"):
        make_step("ring", 2, narrow(scope="layer"), mlp="tiled")
