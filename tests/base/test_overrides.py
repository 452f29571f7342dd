"""Overrides: every prefix reaches its figure, and a wrong key or value is named with what is allowed."""

from __future__ import annotations

import pytest

from sim.base.errors import InputError
from sim.base.overrides import override
from sim.words.workload import load_model
from topology.cluster import load_cluster
from topology.specs import ClusterSpec


def changed(path: str, text: str) -> ClusterSpec:
    return override(load_cluster("hgx-h100"), [(path, text)], "--set")


def test_absolute_and_relative_values() -> None:
    spec = changed("nvlink.bytes_per_s", "900e9")
    assert spec.nvlink is not None
    assert spec.nvlink.bytes_per_s == 900e9
    assert changed("hbm.bytes_per_s", "*2").hbm.bytes_per_s == 6.7e12
    assert changed("hbm.bytes_per_s", "/2").hbm.bytes_per_s == 1.675e12
    assert changed("gpus_per_node", "4").gpus_per_node == 4
    assert changed("gpu.peak_flops_per_s.bf16", "1e15").gpu.peak_flops_per_s["bf16"] == 1e15


def test_one_device_of_many() -> None:
    spec = changed("gpu[3].speed", "0.95")
    assert spec.per_gpu[3].speed == 0.95
    again = override(spec, [("gpu[3].speed", "*2")], "--set")
    assert again.per_gpu[3].speed == 1.9


def test_models_too() -> None:
    assert override(load_model("tiny"), [("num_kv_heads", "2")], "--set").num_kv_heads == 2


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("nvlink.bytes_per_sec", "1", "unknown key 'nvlink.bytes_per_sec'.*did you mean 'nvlink.bytes_per_s'"),
        ("nvlink", "1", "unknown key"),
        ("nvlink.bytes_per_s.x", "1", "unknown key"),
        ("nvlink.bytes_per_s", "0", "=-?[01]: expected a number > 1e-30"),
        ("nvlink.bytes_per_s", "-1", "=-?[01]: expected a number > 1e-30"),
        ("nvlink.bytes_per_s", "nan", "expected a finite number"),
        ("nvlink.bytes_per_s", "inf", "expected a finite number"),
        ("nvlink.bytes_per_s", "fast", "expected a number"),
        ("nvlink.bytes_per_s", "*x", "expected a number"),
        ("nvlink.bytes_per_s", "/0", "divide by zero"),
        ("gpus_per_node", "2.5", "=2.5: expected a whole number"),
        ("pcie.peers", "swich", "=swich: allowed are node, switch"),
        ("socket.per_nod", "3", "did you mean 'socket.per_node'"),
        ("gpu[9].speed", "1", "beyond the 8 GPUs"),
        ("gpu[1].clock", "1", "unknown key"),
        ("loopback.bytes_per_s", "1", "unknown key"),
        ("socket.per_node", "1e8", "socket.per_node=1e8: expected a whole number <= 64"),
    ],
)
def test_wrong_overrides(path: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        changed(path, text)
    assert "--set" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flag_that_is_left_out_can_be_set() -> None:
    tiny, tied = load_model("tiny"), override(load_model("tiny"), [("tied_embeddings", "true")], "--set")
    assert not tiny.tied_embeddings
    assert tied.tied_embeddings is True
    assert not override(tied, [("tied_embeddings", "false")], "--set").tied_embeddings
    assert override(tiny, [("tied_embeddings", "false")], "--set") == tiny


def test_words_that_are_left_out_can_be_set_and_left_out_again() -> None:
    tiny = load_model("tiny")
    found = override(tiny, [("biases", "qkv+out"), ("qk_norm", "head"), ("mlp", "gelu")], "--set")
    assert (found.biases, found.qk_norm, found.mlp) == (("qkv", "out"), "head", "gelu")
    assert override(found, [("biases", "none"), ("qk_norm", "none"), ("mlp", "none")], "--set") == tiny
    assert override(found, [("num_layers", "3")], "--set").biases == ("qkv", "out")
    for path, wrong in (("biases", "qkv+all"), ("qk_norm", "both"), ("mlp", "3")):
        with pytest.raises(InputError, match=f"{path}.*allowed are"):
            override(tiny, [(path, wrong)], "--set")


def test_numbers_that_are_left_out_can_be_set_and_left_out_again() -> None:
    tiny = load_model("tiny")
    found = override(tiny, [("lora_rank", "16"), ("lora_alpha", "0.5"), ("rotary_dims", "8")], "--set")
    assert (found.lora_rank, found.lora_alpha, found.rotary_dims) == (16, 0.5, 8)
    assert override(found, [("lora_rank", "*2")], "--set").lora_rank == 32
    assert override(found, [(name, "none") for name in ("lora_rank", "lora_alpha", "rotary_dims")], "--set") == tiny
    for path, wrong in (("lora_rank", "0"), ("lora_rank", "1.5"), ("lora_rank", "few"), ("lora_alpha", "-1")):
        with pytest.raises(InputError, match=f"--set {path}={wrong}: expected a"):
            override(tiny, [(path, wrong)], "--set")
    with pytest.raises(InputError, match="no present value to scale"):
        override(tiny, [("lora_rank", "*2")], "--set")


def test_heads_that_do_not_divide_after_an_override() -> None:
    with pytest.raises(InputError, match="num_kv_heads 3 does not divide num_heads 8: allowed are 1, 2, 4, 8"):
        override(load_model("tiny"), [("num_kv_heads", "3")], "--set")


@pytest.mark.parametrize("turned", [False, True])
def test_overrides_have_to_be_valid_together_only(turned: bool) -> None:
    changes = [("num_heads", "6"), ("num_kv_heads", "3")]
    found = override(load_model("tiny"), changes[::-1] if turned else changes, "--set model.")
    assert (found.num_heads, found.num_kv_heads) == (6, 3)


def test_of_several_overrides_the_wrong_one_is_named() -> None:
    changes = [("hbm.bytes_per_s", "*2"), ("hbm.bytes_per_s", "*2"), ("pcie.peers", "swich"), ("gpus_per_node", "4")]
    with pytest.raises(InputError, match="^--set cluster.pcie.peers=swich: allowed are node, switch$"):
        override(load_cluster("hgx-h100"), changes, "--set cluster.")
    assert override(load_cluster("hgx-h100"), changes[:2], "--set cluster.").hbm.bytes_per_s == 4 * 3.35e12
    with pytest.raises(InputError, match=r"^--set model.num_heads=6, --set model.num_kv_heads=4: num_kv_heads 4 does"):
        override(load_model("tiny"), [("num_heads", "6"), ("num_kv_heads", "4")], "--set model.")
