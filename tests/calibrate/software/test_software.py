"""What is counted of software: kernels, bytes, what is kept and peaks that can be told by hand; what ships, again."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import msgspec
import pytest
import torch
from torch.nn import functional

from calibrate.software.counting import losses
from calibrate.software.counting.asked import Asked
from calibrate.software.counting.count import Ready, Run, received, run
from calibrate.software.counting.log import Call, Log
from calibrate.software.counting.sizes import TO_CHECK, TO_DERIVE, Sizes, formula
from calibrate.software.libraries import transformers_modules
from calibrate.software.libraries.compiled import compiled, in_kernels
from calibrate.software.libraries.transformers_modules import FAMILIES, Modules
from calibrate.software.tables import SOFTWARE, counted, derived, encoded, version
from sim.base.errors import InputError
from sim.software.counted import Formula, counted_names, load_counted
from tests.reading_code import ROOT

OF_TRANSFORMERS = {name for name in SOFTWARE if name.startswith("transformers") or name == "liger"}
needs_transformers = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers is not there: longstep[software] has it"
    ),
    pytest.mark.filterwarnings("default"),  # of transformers' own imports
]
MARKS = {**dict.fromkeys(OF_TRANSFORMERS, needs_transformers), "torchtitan-compiled": [pytest.mark.slow]}
EVERY = [pytest.param(name, marks=MARKS.get(name, [])) for name in SOFTWARE]


@pytest.mark.sweep
@pytest.mark.parametrize("name", EVERY)
def test_what_ships_is_what_is_counted(name: str) -> None:
    shipped = load_counted(name)
    for package, of in shipped.versions.items():
        if version(package) != of:
            pytest.skip(f"counted with {package} {of}, and {version(package)} is here")
    found = counted(name)
    assert msgspec.structs.replace(found, created=shipped.created) == shipped


def test_every_table_that_ships_can_be_counted_again() -> None:
    assert sorted(SOFTWARE) == counted_names()


def said(calls: list[Call]) -> list[tuple[str, Formula, Formula]]:
    return [(call.kernel, formula(call.reads), formula(call.writes)) for call in calls]


def by_hand(sizes: Sizes) -> Ready:
    """``y = x * rsqrt(mean(x ** 2) + eps) * w``: x and w of bf16, between casts to fp32 and back."""
    x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
    weight = torch.nn.Parameter(torch.empty(sizes["hidden"], dtype=torch.bfloat16))

    return Ready(lambda: (normed(x, weight),), (x,))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight


def test_kernels_of_a_norm() -> None:
    """Forward, in bytes an element of T x h unless another size is named: the cast reads 2 and writes 4; the square
    reads and writes 4; the mean reads 4 and writes 4 a token; eps and rsqrt read and write 4 a token; the product reads
    4 and 4 a token, and writes 4; the cast back reads 4 and writes 2; the weight reads 2 and 2 a column, and writes 2.
    """
    elements, tokens, columns = "tokens*hidden", "tokens", "hidden"
    found = run(by_hand, TO_DERIVE)
    assert said(found.forward) == [
        ("_to_copy", {elements: 2}, {elements: 4}),
        ("pow", {elements: 4}, {elements: 4}),
        ("mean", {elements: 4}, {tokens: 4}),
        ("add", {tokens: 4}, {tokens: 4}),
        ("rsqrt", {tokens: 4}, {tokens: 4}),
        ("mul", {elements: 4, tokens: 4}, {elements: 4}),
        ("_to_copy", {elements: 4}, {elements: 2}),
        ("mul", {elements: 2, columns: 2}, {elements: 2}),
    ]
    # Kept: x in fp32 (the square and the product both need it), rsqrt, and what the weight multiplies, in bf16.
    assert formula(found.kept) == {elements: 4 + 2, tokens: 4}
    # Backward: the weight's gradient is a product and its sum; then the product by rsqrt, whose own gradient is a sum
    # over elements and three kernels of tokens, and that of the mean one that fills; the square has three of elements.
    assert said(found.backward) == [
        ("mul", {elements: 2 + 2}, {elements: 2}),
        ("mul", {elements: 2, columns: 2}, {elements: 2}),
        ("sum", {elements: 2}, {columns: 2}),
        ("_to_copy", {elements: 2}, {elements: 4}),
        ("mul", {elements: 4 + 4}, {elements: 4}),
        ("mul", {elements: 4, tokens: 4}, {elements: 4}),
        ("sum", {elements: 4}, {tokens: 4}),
        ("pow", {tokens: 4}, {tokens: 4}),
        ("mul", {tokens: 4}, {tokens: 4}),
        ("mul", {tokens: 4 + 4}, {tokens: 4}),
        ("div", {tokens: 4}, {elements: 4}),
        ("pow", {elements: 4}, {elements: 4}),
        ("mul", {elements: 4}, {elements: 4}),
        ("mul", {elements: 4 + 4}, {elements: 4}),
        ("add", {elements: 4 + 4}, {elements: 4}),
        ("_to_copy", {elements: 4}, {elements: 2}),
    ]


def test_kernels_whose_operands_lie_in_other_orders() -> None:
    """A permuted tensor alone is dense; beside a contiguous one, broadcast, or a part of a larger one it is not."""
    whole, other = torch.empty(3, 5, 8, device="meta"), torch.empty(3, 5, 8, device="meta")
    permuted, row = torch.empty(5, 3, 8, device="meta").transpose(0, 1), torch.empty(8, device="meta")
    with Log() as log:
        for operands in ((whole, other), (permuted, permuted), (permuted, whole), (whole, row)):
            torch.add(*operands)
        torch.neg(whole[..., :4])
        torch.neg(whole[:1])
        permuted.contiguous()
        whole.sum(0)
    assert [call.scattered for call in log.calls] == [False, False, True, True, True, False, True, False]


@pytest.mark.sweep
def test_a_norm_that_is_compiled() -> None:
    """Forward is one kernel: it reads x and w, and writes y and, for backward, rsqrt. Backward has two, since the sum
    over tokens is one of its own: both read x, rsqrt and the gradient of y, one writes that of x, the other that of w.
    Kept are x and rsqrt: what the weight multiplies is made again.
    """
    graphs: list[torch.fx.Graph] = []

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        weight = torch.nn.Parameter(torch.empty(sizes["hidden"], dtype=torch.bfloat16))
        return compiled(normed, (x,), graphs, x, weight)

    found = in_kernels(run(build, TO_DERIVE), graphs)
    elements, tokens, columns = "tokens*hidden", "tokens", "hidden"
    assert said(found.forward) == [("fused", {elements: 2, columns: 2}, {elements: 2, tokens: 4})]
    assert sorted(said(found.backward)) == [
        ("fused", {elements: 2 + 2, columns: 2, tokens: 4}, {elements: 2}),
        ("fused sum", {elements: 2 + 2, tokens: 4}, {columns: 2}),
    ]
    assert formula(found.kept) == {elements: 2, tokens: 4}


@pytest.mark.sweep
def test_a_product_parts_what_is_compiled() -> None:
    """silu(x) @ w * sin(x): the first kernel makes the silu, and the sine with the product of both is another."""
    graphs: list[torch.fx.Graph] = []

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        weight = torch.nn.Parameter(torch.empty(sizes["hidden"], sizes["hidden"], dtype=torch.bfloat16))
        return compiled(lambda x, w: functional.silu(x) @ w * x.sin(), (x,), graphs, x, weight)

    found = in_kernels(run(build, TO_DERIVE), graphs)
    assert said([call for call in found.forward if call.flops is None]) == [
        ("fused", {"tokens*hidden": 2}, {"tokens*hidden": 2}),
        ("fused", {"tokens*hidden": 4}, {"tokens*hidden": 2}),
    ]


@pytest.mark.sweep
def test_complex_numbers_part_what_is_compiled() -> None:
    """The cast to fp32 is one kernel, the product of complex numbers ATen's, and the cast back a third.
    Of pairs of 4 bytes, angles are one a position of all sequences.
    """
    graphs: list[torch.fx.Graph] = []

    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(2).bfloat16()

    def build(sizes: Sizes) -> Ready:
        x = received(torch.bfloat16, sizes["batch"], sizes["sequence"], sizes["head_dim"])
        angles = torch.empty(sizes["sequence"], sizes["head_dim"] // 2, dtype=torch.complex64)
        return compiled(rotated, (x,), graphs, x, angles)

    found = in_kernels(run(build, TO_DERIVE), graphs)
    elements, positions = "tokens*head_dim", "sequence*head_dim"
    assert said(found.forward) == [
        ("mul", {elements: 4, positions: 4}, {elements: 4}),
        ("fused", {elements: 2}, {elements: 4}),
        ("fused", {elements: 4}, {elements: 2}),
    ]


def test_views_and_inputs_are_no_kernels_and_one_storage() -> None:
    """Of x, its transpose and x again a product keeps x once; the sum writes one number, and its gradient is a view."""

    def build(sizes: Sizes) -> Ready:
        x = received(torch.float32, sizes["tokens"], sizes["hidden"])
        return Ready(lambda: ((x * x.t().t() * x).view(-1).sum(),), (x,))

    found = run(build, TO_DERIVE)
    assert said(found.forward) == [
        ("mul", {"tokens*hidden": 4}, {"tokens*hidden": 4}),  # the same elements twice are read once
        ("mul", {"tokens*hidden": 8}, {"tokens*hidden": 4}),
        ("sum", {"tokens*hidden": 4}, {"1": 4}),
    ]
    assert formula(found.kept) == {"tokens*hidden": 4 + 4}
    # What is expanded is read as what it is expanded of: the gradient of the sum is one number.
    assert said(found.backward)[1] == ("mul", {"1": 4, "tokens*hidden": 4}, {"tokens*hidden": 4})


def test_peak_of_a_loss() -> None:
    """Bytes a logit: cross_entropy of fp32 logits keeps its log-softmax (4), and backward writes zeros for the gradient
    of the classes (4) and then that of the logits (4). bf16 logits (2) and their fp32 copy (4) are gone by then; with
    the log-softmax they were 10.
    """
    found = losses.torchtitan(TO_DERIVE)
    assert formula(one.operand for one in found.peak)["tokens*vocab"] == 12
    assert formula(found.kept)["tokens*vocab"] == 4

    def held(sizes: Sizes) -> Ready:
        """The same for somebody who keeps the logits: 2 more."""
        head = torch.nn.Linear(sizes["hidden"], sizes["vocab"], bias=False, dtype=torch.bfloat16)
        x = received(torch.bfloat16, sizes["tokens"], sizes["hidden"])
        labels, kept = torch.empty(sizes["tokens"], dtype=torch.int64), list[torch.Tensor]()

        def loss() -> tuple[torch.Tensor]:
            kept.append(head(x))
            return (functional.cross_entropy(kept[0].float(), labels),)

        return Ready(loss, (x,))

    assert formula(one.operand for one in run(held, TO_DERIVE).peak)["tokens*vocab"] == 14


def test_a_chunk_is_what_one_more_adds() -> None:
    """Its logits twice, since they are recomputed, and its gradient of the weight added to that of the others."""
    part = derived("chunk", Asked("each chunk", losses.chunk, peak=True))
    logits = "vocab*chunk"
    assert part.kept == {"hidden*chunk": 2}
    assert part.peak[logits] == 12
    assert part.forward.traffic[logits] == 6 + 8
    assert part.backward.traffic[logits] == (6 + 8) + 4 + 12 + 6
    assert part.backward.traffic["hidden*vocab"] == 2 + 2 + 2
    assert sum(one.launches for one in part.backward.products) == 1 + 2


def test_bytes_of_a_step_of_adamw() -> None:
    """fp32: fused reads parameter, gradient and two moments, and writes all but the gradient; foreach has 8 kernels of
    1 + 1 (decay), 2 + 1, 1 + 1, 2 + 1, 1 + 1, 1 + 1, 1 + 1 and 3 + 1 times 4 bytes, with a list of roots beside them.
    """
    parts = load_counted("torch-optimisers").parts
    assert parts["adamw-fused-fp32"].step.traffic["parameters"] == 4 * (4 + 3)
    for how in ("foreach", "for-loop"):
        step = parts[f"adamw-{how}-fp32"].step
        assert (step.launches, step.traffic["parameters"]) == (8, 4 * (2 + 3 + 2 + 3 + 2 + 2 + 2 + 4))
    assert [parts[f"adamw-{how}-fp32"].peak.get("parameters", 0) for how in ("fused", "foreach")] == [0, 4]


def test_bytes_of_a_loss_in_place() -> None:
    """Of a logit, forward: the cast reads 2 and writes 4, the maximum reads 4, its subtraction and the exponential read
    and write 4 each, the sum reads 4, the division reads and writes 4. Backward: the product by the gradient reads and
    writes 4, and its cast to bf16 reads 4 and writes 2. Classes are read and written at their place alone.

    nanotron subtracts out of place, and its caller holds what it subtracts from: 4 + 4. Megatron subtracts in place,
    while its caller holds logits of bf16: 2 + 4.
    """
    for name, peak in {"nanotron": 4 + 4, "megatron": 2 + 4}.items():
        part = load_counted(name).part("loss")
        assert part.forward.traffic["tokens*vocab"] == 6 + 4 + 8 + 8 + 4 + 8
        assert part.backward.traffic["tokens*vocab"] == 8 + 6
        assert (part.kept["tokens*vocab"], part.peak["tokens*vocab"]) == (4, peak)
    fused = load_counted("megatron").part("loss-fused")
    assert fused.forward.traffic["tokens*vocab"] == (2 + 4) + (4 + 4) + (4 + 4)
    assert fused.backward.traffic["tokens*vocab"] == 4 + 4 + 2


def test_bytes_of_an_mlp_that_is_one_product_up() -> None:
    """Of an element of the MLP, forward: silu reads and writes 2, the product reads 4 and writes 2; fused, gate and up
    are read and their product written. Backward: two products and the silu's read 4 and write 2 each, and halves are
    put together, 4 and 4; fused, 6 are read and 4 written, and the silu is made again instead of kept.
    """
    eager, fused = (load_counted(name).part("mlp") for name in ("nanotron", "megatron"))
    assert [one.traffic["tokens*ffn"] for one in (eager.forward, eager.backward)] == [4 + 6, 3 * 6 + 8]
    assert [one.traffic["tokens*ffn"] for one in (fused.forward, fused.backward)] == [4 + 2, 6 + 4]
    assert [one.kept["tokens*ffn"] for one in (eager, fused)] == [8, 6]
    assert fused.forward.launches == fused.backward.launches == 1


def test_queries_keys_and_values_of_one_product_are_told_apart() -> None:
    part = load_counted("megatron").part("attention")
    assert part.forward.products[0].writes == {"tokens*heads*head_dim": 2, "tokens*kv_heads*head_dim": 2 * 2}
    assert part.forward.products[0].flops == {
        "tokens*hidden*heads*head_dim": 2, "tokens*hidden*kv_heads*head_dim": 2 * 2,
    }  # fmt: skip


def test_elements_that_are_pointed_to_are_not_the_whole() -> None:
    """One logit a token: two indices of 8 bytes, and 4 of the logit. A mask reads and writes all of what it masks."""

    def build(sizes: Sizes) -> Ready:
        logits = torch.empty(sizes["tokens"], sizes["vocab"])
        rows, classes = (torch.empty(sizes["tokens"], dtype=torch.int64) for _ in range(2))
        mask = torch.empty(sizes["tokens"], dtype=torch.bool)

        def forward() -> tuple[torch.Tensor]:
            picked = logits[rows, classes]
            picked[mask] = 0.0
            logits[rows, classes] = picked
            return (picked,)

        return Ready(forward)

    index, _, masked, put = said(run(build, TO_DERIVE).forward)
    assert index == ("index", {"tokens": 4 + 2 * 8}, {"tokens": 4})
    assert masked == ("index_put_", {"tokens": 4 + 1, "1": 4}, {"tokens": 4})
    assert put == ("index_put_", {"tokens": 2 * 8 + 4}, {"tokens": 4})


def test_a_tile_of_an_mlp_runs_forward_twice() -> None:
    """Of an element of the MLP, forward: silu 4, product 6. Backward does so once more before its 18; gradients of
    three weights are added to those of the tiles before, 6 each, and that of x to zeros, after both of its own: 6 + 6.
    """
    tile = load_counted("alst").part("mlp-tile")
    assert tile.forward.traffic == {"ffn*chunk": 4 + 6}
    assert tile.backward.traffic == {"ffn*chunk": 4 + 6 + 18, "hidden*ffn": 3 * 6, "hidden*chunk": 6 + 6}
    assert [sum(one.launches for one in of.products) for of in (tile.forward, tile.backward)] == [3, 3 + 6]
    assert tile.kept == {"hidden*chunk": 2}


def test_bytes_around_a_step() -> None:
    """Of a parameter: nanotron adds bf16 to fp32, takes the norm and scales, casts masters, and sets to zero. DeepSpeed
    fills buckets, casts to fp64 for the norm, puts gradients together, casts them to fp32 and scales. FSDP2 casts
    before it copies.
    """
    of_nanotron, of_deepspeed, of_fsdp2 = (
        {name: part.step.traffic.get("parameters") for name, part in load_counted(table).parts.items()}
        for table in ("nanotron", "deepspeed-step", "fsdp2-copies")
    )
    assert [of_nanotron[name] for name in ("accumulate", "clip", "copy-back", "zero")] == [
        2 + 4 + 4, 4 + (4 + 4), 4 + 2, 4,
    ]  # fmt: skip
    assert [of_deepspeed[name] for name in ("bucket", "bucket-fp32", "partition")] == [
        3 * (2 + 2), (2 + 4) + 2 * (4 + 4), 2 + 2,
    ]  # fmt: skip
    assert [of_deepspeed[name] for name in ("norm", "gradients", "adamw", "copy-back")] == [
        (2 + 8) + 8, (2 + 2) + (2 + 4) + (4 + 4), 4 * (4 + 3), 4 + 2,
    ]  # fmt: skip
    assert of_fsdp2 == {
        "gather-in": (4 + 2) + (2 + 2), "gather-out": 2 + 2, "scatter-in-fp32": 2 + 4, "scatter-in-bf16": 2 + 2,
        "scatter-out-bf16": 2 + 4, "accumulate": 8 + 4,
    }  # fmt: skip


def test_what_is_proportional_to_nothing_known_is_no_formula() -> None:
    """A kernel of half the tokens and one: right at one size by chance, and refused at the others."""

    def odd(sizes: Sizes) -> Run:
        def build(sizes: Sizes) -> Ready:
            x = torch.empty(sizes["tokens"] // 2 + 1)
            return Ready(lambda: (x + 1,))

        return run(build, sizes)

    with pytest.raises(ValueError, match="half: kernels at .* are not those of the formulas"):
        derived("half", Asked("half of the tokens", odd))


def test_a_part_that_is_not_in_a_whole_is_refused() -> None:
    whole = run(by_hand, TO_DERIVE)
    assert whole.without(whole)[:3] == ([], [], [])
    with pytest.raises(ValueError, match="no part of the whole"):
        whole.without(run(by_hand, TO_CHECK[0]))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="none-such is not installed.*longstep.software."):
        version("none-such")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in sorted(OF_TRANSFORMERS):
        with pytest.raises(InputError, match="transformers is not installed"):
            counted(name)
    with pytest.raises(InputError, match="unknown software 'torch'.*torch-losses.*set it with NAME of longstep count"):
        counted("torch")


@pytest.mark.parametrize("name", counted_names())
def test_a_table_is_written_as_it_ships(name: str) -> None:
    assert encoded(load_counted(name)).decode() == (ROOT / "sim" / "software" / "counted" / f"{name}.toml").read_text()


@pytest.mark.parametrize("family", [pytest.param(family, marks=needs_transformers) for family in FAMILIES])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_is_its_parts(family: str, autocast: bool) -> None:
    """All of its kernels and all that it keeps, and no more."""
    modules = Modules(family, autocast=autocast)
    whole = modules.run(transformers_modules.layer, TO_DERIVE)
    names = ["norm", "norm", "residual", "residual", "rotary", "mlp"]
    names += ["query_norm", "key_norm"] if family == "qwen3" else []
    parts = [modules.run(getattr(transformers_modules, name), TO_DERIVE) for name in names]
    parts.append(transformers_modules.attention_alone(modules, TO_DERIVE))
    if family == "qwen2":
        parts.append(transformers_modules.biases_alone(modules, TO_DERIVE))
    assert whole.without(*parts)[:3] == ([], [], [])
