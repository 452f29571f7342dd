"""Techniques that save memory in a training step, each alone and in the stacks that their authors publish.

What a stack switches on is taken from memory of its authors' paper and code, but for UPipe's, whose table says it
(``experiments/published/upipe_h100.toml``). No stack has the name of a schedule: one whose authors gave their schedule
a name of its own has the name of the whole (DeepSpeed's Ulysses-Offload plays FPDT, Untied Ulysses plays UPipe).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.base.errors import unknown


class Technique(NamedTuple):
    """What saves memory and costs time. Both states are options of schedules; the option ``schedule`` is which one.
    Where a technique is off, so is what needs it.
    """

    about: str
    off: Mapping[str, str]
    on: Mapping[str, str]
    source: str


class Stack(NamedTuple):
    """Techniques that are used together, with the schedule that they were published with."""

    about: str
    schedule: str
    options: Mapping[str, str]
    source: str


TECHNIQUES: dict[str, Technique] = {
    "FSDP": Technique(
        "weights, gradients and optimiser sharded over all GPUs", {"zero_stage": "0", "optimiser": "gpu"},
        {"zero_stage": "3"}, "arXiv:2304.11277",
    ),
    "checkpointing": Technique(
        "layers keep their input only, and are computed again", {"checkpoint": "none"}, {"checkpoint": "full"},
        "arXiv:1604.06174",
    ),
    "Ulysses": Technique(
        "tokens of one sequence on all GPUs", {"schedule": "single"}, {"schedule": "ulysses"}, "arXiv:2309.14509"
    ),
    "chunked loss": Technique(
        "logits of some tokens at a time", {"loss": "whole"}, {"loss": "chunked"}, "arXiv:2410.10989 §3.2"
    ),
    "offload": Technique(
        "what layers keep lies in the host's memory", {"activations": "hbm"}, {"activations": "host"},
        "arXiv:2506.13996",
    ),
    "tiled MLP": Technique(
        "MLP of some tokens at a time", {"mlp": "whole"}, {"mlp": "tiled"}, "arXiv:2506.13996"
    ),
    "head chunks": Technique(
        "attention of some heads at a time", {"schedule": "ulysses"}, {"schedule": "upipe"}, "arXiv:2602.21196"
    ),
    "optimiser on the host": Technique(
        "fp32 weights, moments and AdamW on the host", {"optimiser": "gpu"}, {"optimiser": "host"}, "arXiv:2101.06840"
    ),
}  # fmt: skip
"""In the order in which the ladder switches them on: behind the one whose schedule it needs each."""

STACKS: dict[str, Stack] = {
    "fsdp": Stack("FSDP and full checkpointing, no context parallelism", "single", {}, "arXiv:2304.11277"),
    "unsloth": Stack(
        "inputs of layers offloaded behind the forward pass, loss in chunks", "single",
        {"activations": "host", "loss": "chunked"}, "unsloth.ai/blog/long-context",
    ),
    "bpt": Stack(
        "attention and MLP block by block, on each GPU by itself", "single", {"mlp": "mini"}, "arXiv:2305.19370 §3"
    ),
    "mst": Stack(
        "MLP and loss in mini-sequences, on each GPU by itself", "single", {"mlp": "mini", "loss": "chunked"},
        "arXiv:2407.15892 §3",
    ),
    "alst": Stack(
        "Ulysses, MLP and loss in tiles, inputs of layers and the optimiser on the host", "ulysses",
        {"mlp": "tiled", "loss": "chunked", "activations": "save-on-cpu", "optimiser": "host"}, "arXiv:2506.13996 §3",
    ),
    "ulysses-offload": Stack(
        "attention over chunks that wait on the host, MLP and loss in tiles, inputs of layers on the host", "fpdt",
        {"pipeline": "published", "mlp": "tiled", "loss": "chunked", "activations": "host"}, "arXiv:2408.16978 §4",
    ),
    "untied-ulysses": Stack(
        "attention of some heads at a time, MLP and loss in tiles, inputs of layers on the host", "upipe",
        {"mlp": "tiled", "loss": "chunked", "activations": "save-on-cpu"}, "arXiv:2602.21196 §5",
    ),
    "5m": Stack(
        "what untied-ulysses has with copies beside kernels, and the optimiser on the host", "upipe",
        {"mlp": "tiled", "loss": "chunked", "activations": "host", "optimiser": "host"}, "this table",
    ),
}  # fmt: skip


def stack_of(name: str) -> Stack:
    """Return a stack by its name; raises InputError if there is none."""
    if name not in STACKS:
        players = " and ".join(stack for stack, one in STACKS.items() if one.schedule == name)
        meant = f", or the schedule with `schedule` {name} (which {players} play)" if players else ""
        raise unknown("stack", name, STACKS, f"`stack`{meant}")
    return STACKS[name]


_TAKEN = {
    "loss": {
        "whole": "logits of all tokens",
        "unfused": "logits of all tokens, and a copy",
        "subtracted": "logits of all tokens, and two copies",
        "torch": "logits of all tokens, and three copies",
    },
    "optimiser_states": {"fp32": "fp32 states", "model": "states in the model's type"},
    "weights": {"host": "weights on the host", "host-states": "the optimiser's weights gathered from the host"},
}
"""What decides much of the memory where no technique is named, by option and value."""


def techniques_on(options: Mapping[str, Any]) -> list[str]:
    """Return which techniques the options of a schedule switch on, with the options that do; and which loss and which
    states of the optimiser are taken.

    >>> techniques_on({"zero_stage": 3, "checkpoint": "full", "loss": "whole"})
    ['FSDP (zero_stage=3)', 'checkpointing (checkpoint=full)', 'logits of all tokens (loss=whole)']
    """
    found = []
    for name, technique in TECHNIQUES.items():
        own = {key: str(options[key]) for key in technique.on if options.get(key) not in {None, *_TAKEN.get(key, ())}}
        if own and any(value != technique.off[key] for key, value in own.items()):
            found.append(f"{name} ({', '.join(f'{key}={value}' for key, value in own.items())})")
    for key, values in _TAKEN.items():
        if said := values.get(str(options.get(key))):
            found.append(f"{said} ({key}={options[key]})")
    return found
