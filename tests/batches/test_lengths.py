"""Drawn lengths have the published shares and quantiles; seeds repeat; files are read or refused."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.base.errors import InputError
from sim.batches.files import read_lengths, typed_lengths
from sim.batches.lengths import draw, histogram, lognormal, scaled, uniform

# p50, p90, p99 and mean of the documents, computed from the files that the histograms were counted from.
PUBLISHED = {
    "wlb-llm": (3227, 5784, 26070, 3961.8),
    "prolong": (1914, 6051, 16273, 3051.9),
    "wikipedia": (347, 2112, 10921, 1013.6),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_lengths_have_published_quantiles(name: str) -> None:
    found = histogram(name)(np.random.default_rng(1), 400_000)
    quantiles = np.percentile(found, (50, 90, 99))
    assert quantiles == pytest.approx(PUBLISHED[name][:3], rel=0.03)
    assert found.mean() == pytest.approx(PUBLISHED[name][3], rel=0.03)


def test_shares_of_documents_are_those_of_the_source() -> None:
    found = histogram("magi")(np.random.default_rng(1), 400_000)
    assert np.mean((found >= 201) & (found <= 500)) == pytest.approx(0.2819, abs=0.003)
    assert np.mean(found > 131072) == pytest.approx(0.0014, abs=0.0003)
    assert found.min() >= 1


def test_few_long_documents_have_a_large_share_of_the_tokens() -> None:
    found = histogram("wlb-llm")(np.random.default_rng(1), 400_000)
    assert found[found > 65536].sum() / found.sum() == pytest.approx(0.128, abs=0.01)  # 0.53 % of the documents


@given(st.integers(1, 5000), st.integers(0, 99), st.none() | st.integers(1, 700))
def test_draws_fill_the_batch_and_repeat(num_tokens: int, seed: int, longest: int | None) -> None:
    found = draw(lognormal(200, 1.0), num_tokens, seed, longest)
    assert sum(found) == num_tokens
    assert min(found) >= 1
    assert max(found) <= (longest or num_tokens)
    assert found == draw(lognormal(200, 1.0), num_tokens, seed, longest)


def test_other_seeds_draw_other_batches() -> None:
    assert draw(uniform(1, 100), 1000, 0) != draw(uniform(1, 100), 1000, 1)


def test_scaled_lengths_are_multiples() -> None:
    assert draw(scaled(uniform(7, 7), 2.0), 28, 0) == (14, 14)
    assert set(draw(scaled(uniform(1, 1), 0.1), 5, 0)) == {1}


def test_lognormal_has_its_median() -> None:
    assert np.median(lognormal(300, 1.2)(np.random.default_rng(0), 100_000)) == pytest.approx(300, rel=0.02)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: histogram("wlb"), "did you mean 'wlb-llm'"),
        (lambda: lognormal(0.5, 1), "`median` 0.5"),
        (lambda: uniform(5, 2), "`at_least` 5 and `at_most` 2"),
        (lambda: scaled(uniform(1, 2), 0), "`factor` 0"),
        (lambda: draw(uniform(1, 2), 0, 0), "`num_tokens` 0"),
        (lambda: draw(uniform(1, 2), 5, 0, longest=0), "`longest` 0"),
    ],
)
def test_bad_distributions_are_refused(make: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()  # type: ignore[operator]


def test_a_histogram_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('source = "me"\nbins = [{at_least = 5, at_most = 5, documents = 1}]\n')
    assert draw(histogram(str(file)), 20, 0) == (5, 5, 5, 5)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.txt", "5000, 3000\n192\n\n", (5000, 3000, 192)),
        ("a.jsonl", '{"length": 7, "id": "x"}\n\n{"length": 9}\n', (7, 9)),
        ("a.txt", "\ufeff5000\r\n192", (5000, 192)),
        ("a.jsonl", '\ufeff{"length": 7}', (7,)),
    ],
)
def test_files_of_lengths(tmp_path: Path, name: str, content: str, wanted: tuple[int, ...]) -> None:
    (tmp_path / name).write_text(content)
    assert read_lengths(str(tmp_path / name)) == wanted


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "5", "unknown ending '.csv'"),
        ("a.txt", "5\n7.5\n", "line 2: '7.5' is no length"),
        ("a.txt", "5\n-7\n", "document 1 has -7 tokens: expected 1 or more"),
        ("a.txt", "5 0", "document 1 has 0 tokens"),
        ("a.txt", "\n", "has no document"),
        ("a.jsonl", '{"length": 7}\n{"size": 7}', "line 2: expected an object with the key 'length'"),
        ("a.jsonl", '{"length": true}', "line 1: True is no length"),
        ("a.jsonl", "{", "line 1: .*expected a JSON object a line"),
        ("a.txt", "", "has no document"),
        ("a.txt", "nan", "line 1: 'nan' is no length"),
        ("a.txt", "1_000", "line 1: '1_000' is no length"),
        ("a.txt", "\u0665\u0660", "is no length"),
        ("a.txt", "1" * 5000, "is no length"),
        ("a.txt", f"5 {10**30}", "more tokens in all than the 2147483648"),
        ("a.jsonl", "", "has no document"),
        ("a.jsonl", '{"length": "7"}', "line 1: '7' is no length"),
        ("a.jsonl", '{"length": NaN}', "line 1: .*expected a JSON object a line"),
        ("a.jsonl", '{"length": 7.0}', "line 1: 7.0 is no length"),
        ("a.jsonl", f'{{"length": {2**63 - 1}}}', "more tokens in all than the 2147483648"),
        ("a.jsonl", "[7]", "line 1: expected an object with the key 'length'"),
        ("a.parquet", "no parquet", "pyarrow|is no Parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=said):
        read_lengths(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no document"),
        (" , ", "has no document"),
        ("5000,-3", "document 1 has -3 tokens"),
        ("5000,0", "document 1 has 0 tokens"),
        ("5.5,3", "`documents`: '5.5' is no length: expected a whole number"),
        ("5.5", "'5.5' is no length"),
        ("nan", "'nan' is no length"),
        ("\uff11,3", "is no length"),
        ("9" * 20, "more tokens in all than the 2147483648"),
        ("9" * 5000, "is no length"),
        ("lengths.csv", "unknown ending '.csv'.*allowed are .txt, .jsonl, .parquet"),
    ],
)
def test_bad_texts_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        typed_lengths(text)
    assert len(str(refused.value)) < 300


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_lengths(str(tmp_path / "none.txt"))


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    found = builtins.__import__

    def without(name: str, *rest: object, **options: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return found(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'longstep\[parquet\]'"):
        read_lengths(str(tmp_path / "a.parquet"))


def test_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "a.parquet")
    parquet.write_table(
        pyarrow.table(
            {"length": [5, 6], "tokens": [7.5, 8.0], "gap": [1, None], "text": ["7", "x"], "long": [2**62, 2**62]}
        ),
        file,
    )
    assert read_lengths(file) == (5, 6)
    with pytest.raises(InputError, match="unknown column 'size'"):
        read_lengths(file, column="size")
    with pytest.raises(InputError, match="row 0: 7.5 is no length"):
        read_lengths(file, column="tokens")
    with pytest.raises(InputError, match="row 1: None is no length"):
        read_lengths(file, column="gap")
    with pytest.raises(InputError, match="row 0: '7' is no length"):
        read_lengths(file, column="text")
    with pytest.raises(InputError, match="more tokens in all"):
        read_lengths(file, column="long")
    parquet.write_table(pyarrow.table({"length": pyarrow.array([], pyarrow.int64())}), file)
    with pytest.raises(InputError, match="has no document"):
        read_lengths(file)
