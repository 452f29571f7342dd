"""Case files: what is read, what is refused, and how predictions are judged."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.evidence import FOLDER, Case, Prediction, order, profile_hash, r_squared, read_cases, scaled
from experiments.selection import Selection, choose
from sim.errors import InputError, LengthError
from sim.presets import preset_names
from sim.profile import load_profile
from tests.experiments.reading import HOSTILE, Read, loads_nothing

OWN = """
title = "Our cluster"
source = "run 17"
quality = "one run"
profile = "a800-ultraattn"

[select]
cluster = "a800"
dtype = "bf16"
set = ["model.head_dim=128"]

[[group]]
name = "two schedules"
target = 0.5
cases = [
  {{ schedule = "ring", gpus = 8, seq = "64K", pass = "forward", measured_s = 0.01 }},
  {{ schedule = "zigzag", gpus = 8, seq = "64K", pass = "forward", measured_s = 0.005{more} }},
]
"""


def prediction(step_s: float, measured_s: float, schedule: str = "ring", **fields: str) -> Prediction:
    case = Case("group", Selection(schedule=schedule, **fields), measured_s)  # type: ignore[arg-type]
    return Prediction(case, step_s, 0.9 * step_s, 1.1 * step_s, "compute", 2)


@pytest.mark.parametrize("name", preset_names(FOLDER))
def test_every_case_that_ships_can_be_simulated(name: str) -> None:
    file, cases = read_cases(name)
    assert file.source
    assert file.quality
    for case in cases:
        chosen = choose(case.selection)
        chosen.entry.build(chosen.workload, chosen.parallel)
        assert chosen.profile == load_profile(file.profile)


def test_cases_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, shown = tmp_path / "ours.toml", tmp_path / "page.html"
    path.write_text(OWN.format(more="").replace("Our cluster", "Our cluster " + HOSTILE.replace('"', "")))
    main(["validate", "--cases", str(path), "--html", str(shown)])
    printed = capsys.readouterr().out
    text = shown.read_text()
    loads_nothing(text)
    assert HOSTILE not in text
    assert Read(text).rows("tr") == [0, 1]
    assert sorted(Read(text).rows("g")) == [0, 1]
    assert "Our cluster" in printed
    assert "two schedules" in printed
    assert "1 of 1" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (", gpu = 8", "did you mean 'gpus'"),
        (', set = "a=b"', "set is a list"),
        (', seq_ = "1K"', "did you mean 'seq'"),
        (", window = true", "Expected `str"),
    ],
)
def test_what_is_wrong_in_a_case(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more=more))
    with pytest.raises(InputError, match=message):
        read_cases(str(path))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("measured_s = 0.01", "measured_s = 0", "no measured_s above 0"),
        ("measured_s = 0.01", "measured_s = nan", "no measured_s above 0"),
        ("measured_s = 0.01", "measured_s = true", "no measured_s above 0"),
        ('"zigzag"', '"zagzig"', "group 'two schedules', measured_s 0.005: unknown schedule"),
        ('"64K"', '"8001"', "the nearest are 8000 or 8008"),
        ("a800-ultraattn", "datasheet", "unknown profile 'datasheet'"),
        ("target", "goal", "unknown field `goal`"),
        ("cases = [", "cases = []\nothers = [", "unknown field `others`"),
    ],
)
def test_what_is_wrong_in_a_case_file(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more="").replace(right, wrong))
    with pytest.raises(InputError, match=message):
        read_cases(str(path))


def test_a_case_file_without_cases_and_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('title = "x"\nsource = "x"\nquality = "x"\nprofile = "a800-ultraattn"\ngroup = []')
    with pytest.raises(InputError, match="a group holds no case"):
        read_cases(str(path))
    with pytest.raises(InputError, match="unknown case file 'ultra'"):
        read_cases("ultra")


def test_how_predictions_are_judged() -> None:
    """Twice: the first pair is in the right order, the second one in the wrong one, the third too close to tell."""
    found = [
        prediction(1.0, 1.0),
        prediction(2.0, 3.0, "zigzag"),
        prediction(1.0, 2.0, seq="16K"),
        prediction(2.0, 1.0, "zigzag", seq="16K"),
        prediction(1.0, 1.0, seq="32K"),
        prediction(3.0, 1.01, "zigzag", seq="32K"),
    ]
    assert order(found) == (1, 2)
    assert [one.covered for one in found[:2]] == [True, False]
    assert found[1].error == pytest.approx(-1 / 3)
    assert r_squared([prediction(1.0, 1.0), prediction(2.0, 2.0)]) == 1
    # Logs 0 and 1, predicted as 0 and 0: all of the variance around 1/2 is 1/2, what is missed is 1.
    assert r_squared([prediction(1.0, 1.0), prediction(1.0, 2.718281828)]) == pytest.approx(-1)


def test_the_hash_is_that_of_the_file() -> None:
    data = (Path(__file__).parents[2] / "sim/profiles/a100-sxm.json").read_bytes()
    assert profile_hash("a100-sxm") == hashlib.sha256(data).hexdigest()[:16]


def test_what_goes_wrong_comes_back_from_workers() -> None:
    error = pickle.loads(pickle.dumps(LengthError(8001, 6)))
    assert str(error) == str(LengthError(8001, 6))
    assert error.above == 8004


def test_intervals_are_all_points_at_their_bounds() -> None:
    profile = load_profile("a800-ultraattn")
    high = scaled(profile, "high")
    point, slower = profile.points[0], high.points[0]
    assert slower.median_s == pytest.approx(point.median_s * profile.residuals[point.kernel].high)
    assert slower.shape == point.shape


def test_the_case_file_of_the_readme(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    path = tmp_path / "ours.toml"
    path.write_text(readme.partition("```toml\n")[2].partition("```")[0])
    file, cases = read_cases(str(path))
    assert file.group[0].target == 0.1
    assert [case.selection.schedule for case in cases] == ["zigzag", "ulysses"]
    assert cases[0].rivals == cases[1].rivals
