"""Random changes of a page's question, each as one control of its form makes it."""

from __future__ import annotations

import random
from typing import Any

FIRST: dict[str, Any] = {"model": "llama3-8b", "cluster": "hgx-h100", "schedule": "ulysses", "seq": "128K"}
RATES = ("nvlink.bytes_per_s", "hbm.bytes_per_s", "gpu.peak_flops_per_s.bf16", "gpu.launch_s")
TECHNIQUES = {
    "zero_stage": ("0", "3"), "checkpoint": ("none", "full"), "loss": ("whole", "chunked"),
    "activations": ("hbm", "host"), "mlp": ("whole", "tiled"), "optimiser": ("gpu", "host"),
}  # fmt: skip
MODELS = ("llama3-8b", "llama3.2-3b", "qwen3-8b", "mistral-7b-v0.3", "qwen2.5-7b")
CLUSTERS = ("hgx-h100", "hgx-h200", "dgx-a100", "hgx-b200")
SCHEDULES = ("ring", "zigzag", "striped", "allgather", "ulysses", "usp", "upipe")
SOFTWARE = (None, "huggingface", "torchtitan", "megatron")


def changed(question: dict[str, Any], draw: random.Random, gpus: tuple[int, ...] = (8,)) -> dict[str, Any]:
    """The question behind one change: of a slider of the machine or of the length more often, as people do."""
    found = {**question, "set": {**question.get("set", {})}}
    what = draw.choice(
        ("rate", "rate", "length", "length", "technique", "schedule", "model", "cluster", "software", "gpus")
    )
    if what == "rate":
        found["set"][f"cluster.{draw.choice(RATES)}"] = f"*{2 ** draw.uniform(-3, 3):.4g}"
    elif what == "length":
        found["seq"] = f"{8 * 2 ** draw.randrange(1, 8)}K"
    elif what == "technique":
        name = draw.choice([*TECHNIQUES])
        found["set"][f"schedule.{name}"] = draw.choice(TECHNIQUES[name])
    elif what == "gpus":
        found["gpus"] = draw.choice(gpus)
    else:
        values = {"schedule": SCHEDULES, "model": MODELS, "cluster": CLUSTERS, "software": SOFTWARE}[what]
        found[what] = draw.choice(values)
    return found
