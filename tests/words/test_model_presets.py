"""Models by name: what people type is found, and each preset has as many weights as were published."""

from __future__ import annotations

import math
import re
from importlib import resources

import pytest

from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.schedule.model.scope import units
from sim.words.workload import Workload, load_model, spoken

NAMES = preset_names("sim/models")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tiny"])
def test_it_has_as_many_weights_as_published(name: str) -> None:
    """To 0.1 % of what its file says, in the first line, that its authors or the weights' files say."""
    text = resources.files("sim").joinpath("models", f"{name}.toml").read_text()
    said = re.match(r"# ([\d,]+) parameters: .*\w+/\w+", text)
    assert said, f"{name} does not say how many parameters were published, and where"
    model = load_model(name)
    workload = Workload(model=model, seq=8, scope="step", layers=model.num_layers)
    found = sum(math.prod(unit.flat.shape(model)) for unit in units(workload))
    assert found == pytest.approx(int(said[1].replace(",", "")), rel=1e-3)
    assert model.name == name
    assert re.search(r"\w+/\w+|arXiv:", model.source)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen3-8b-base", "qwen3-8b"),
        ("Qwen/Qwen2.5-32B-Instruct", "qwen2.5-32b"),
        ("llama-3.1-8b", "llama3.1-8b"),
        ("Llama-3.1-8B", "llama3.1-8b"),
        ("llama3.1-405b", "llama3.1-405b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("microsoft/phi-4", "phi-4"),
        ("microsoft/Phi-3-mini-128k-instruct", "phi-3-mini-128k"),
        ("THUDM/GLM-4-9B-0414", "glm-4-9b-0414"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-1124-7b"),
        ("01-ai/Yi-34B", "yi-34b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("ibm-granite/granite-3.1-8b-base", "granite-3.1-8b"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3-3b"),
        ("tiny", "tiny"),
    ],
)
def test_what_people_type_is_found(typed: str, name: str) -> None:
    assert load_model(typed).name == name


def test_no_two_presets_are_called_alike() -> None:
    assert len({spoken(name) for name in NAMES}) == len(NAMES) >= 50


@pytest.mark.parametrize(
    ("typed", "near"),
    [("Qwen/Qwen3-9B", "qwen3-8b"), ("llama-3.1-80b", "llama3.1-8b"), ("mistral-nemo", "mistral-nemo-2407")],
)
def test_a_name_that_is_none_says_what_is_near(typed: str, near: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"(did you mean {near!r}?)")):
        load_model(typed)


@pytest.mark.parametrize("typed", ["", "/", "a/", "no/such/file", "./none", "x\0y", "../" * 3])
def test_what_is_no_name_is_refused(typed: str) -> None:
    with pytest.raises(InputError):
        load_model(typed)
