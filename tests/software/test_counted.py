"""Tables of what software runs: those that ship can be read, and add up; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.base.errors import InputError
from sim.software.counted import MARK, Counted, amount, counted_names, load_counted
from tests.reading_code import ROOT

SIZES = {
    "batch": 1, "sequence": 4096, "tokens": 4096, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "vocab": 128256, "chunk": 1024, "parameters": 10**9, "multiprocessors": 132,
}  # fmt: skip
HEAD = f'{MARK}\nsoftware = "s"\ncommand = "c"\ncreated = "2026-11-26"\n[versions]\n'


@pytest.mark.parametrize("name", counted_names())
def test_tables_that_ship_say_what_they_are(name: str) -> None:
    table = load_counted(name)
    assert (ROOT / "sim" / "software" / "counted" / f"{name}.toml").read_text().startswith(MARK)
    assert table.command == f"longstep count {name}"
    for part in table.parts.values():
        passes = [part.step] if part.step.kernels else [part.forward, part.backward]
        assert sum(amount(of.traffic, SIZES) for of in passes) > 0 or part.forward.products


def test_bytes_of_a_layer_of_llama() -> None:
    """Forward, of a token and a layer of 4096 hidden, 14336 of the MLP, 32 heads and 8 of keys of 128, in bf16:

    two norms of 36 bytes an element and 24 a token, two sums of 6, rotary of 20 by 5120 elements and 8 by 128 of
    cosines and sines (one sequence, so that its positions are its tokens), and an MLP of 10 by 14336.
    """
    found = load_counted("transformers-llama")
    norms, sums, rotary, mlp = 2 * (36 * 4096 + 24), 2 * 6 * 4096, 20 * 5120 + 8 * 128, 10 * 14336
    times = {"norm": 2, "residual": 2, "rotary": 1, "mlp": 1, "attention": 1}
    traffic = sum(count * amount(found.part(name).forward.traffic, SIZES) for name, count in times.items())
    assert traffic == 4096 * (norms + sums + rotary + mlp) + 2 * 2 * 4096  # and the weights of two norms


def test_fused_is_a_seventh_of_eager() -> None:
    """Which is what the tables are for: norms of Liger against those of transformers, both passes."""
    eager, fused = (load_counted(name).part("norm") for name in ("transformers-llama", "liger"))
    of_eager, of_fused = (
        [amount(of.traffic, SIZES) for of in (part.forward, part.backward)] for part in (eager, fused)
    )
    assert of_eager[0] / of_fused[0] == pytest.approx(9, rel=0.01)  # 36 to 4 bytes an element
    assert of_eager[1] / of_fused[1] == pytest.approx(92 / 6.26, rel=0.01)  # 92 to 6, and sums by multiprocessor
    assert eager.forward.launches == 8 * fused.forward.launches


def table(tmp_path: Path, text: str) -> Counted:
    path = tmp_path / "table.toml"
    path.write_text(HEAD + text)
    return load_counted(str(path))


PART = '[parts.norm]\nwhat = "w"\n[parts.norm.forward]\nkernels = [{ kernel = "mul", dtype = "bf16", '


def test_tables_of_ones_own_are_read(tmp_path: Path) -> None:
    part = table(tmp_path, PART + 'launches = 3, reads = { "tokens*hidden" = 2 }, writes = { tokens = 4 } }]').part(
        "norm"
    )
    assert part.forward.traffic == {"tokens*hidden": 6, "tokens": 12}
    assert (part.forward.launches, part.backward.launches) == (3, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PART + 'reads = { "tokens*width" = 2 } }]', "unknown dimension 'width': allowed are tokens, batch"),
        (PART + 'reads = { "tokens" = -2 } }]', "expected a number >= 0"),
        (PART + "launches = 0 }]", "expected a whole number >= 1"),
        (PART + "bytes = 2 }]", "unknown key 'bytes'"),
        (PART.replace("bf16", "fp8") + "launches = 1 }]", "allowed are fp64, fp32"),
        ('[parts.norm]\nkept = { "tokens" = 2 }', "parts[...].what is missing"),
        ('[parts.norm]\nwhat = "w"\npeak = { "logits" = 2 }', "unknown dimension 'logits'"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        table(tmp_path, text)
    assert says in str(refused.value)
    assert str(refused.value).endswith("change it in that file")
    assert "\n" not in str(refused.value)


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    with pytest.raises(InputError, match="unknown software 'transformers-gpt2'.*transformers-llama"):
        load_counted("transformers-gpt2")
    with pytest.raises(InputError, match="unknown part 'norms' .did you mean 'norm'.*rotary"):
        load_counted("liger").part("norms")
