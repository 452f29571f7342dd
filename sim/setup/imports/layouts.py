"""Layouts of a pipeline: which parts of a model each chunk has, as frameworks write it down."""

from __future__ import annotations

import re

from sim.base.errors import InputError

_LAYER = "layer"
_PARTS = {
    "E": "embedding", "t": _LAYER, "m": "layer that predicts several tokens", "L": "head",
    "embedding": "embedding", "decoder": _LAYER, "mtp": "layer that predicts several tokens", "loss": "head",
    "tok_embeddings": "embedding", "norm": "norm", "output": "head",
}  # fmt: skip
"""What parts are called: letters and words of Megatron-LM, modules of torchtitan."""
_MOST_PARTS = 2**14
"""Of all chunks. No model has so many."""
_EXPECTED = "expected a text such as Et|(tt|)*30L, or a list for each chunk with what it has"


def layers_of_layout(text: str) -> tuple[int, ...]:
    """Return how many layers each chunk has, in the order of the model.

    A text is Megatron-LM's (megatron-core 0.16.1 transformer/pipeline_parallel_layer_layout.py): E embedding, t layer,
    L head and loss, | between chunks, x*N and (x)*N what stands N times. Lists have a word for each part, and |
    between chunks: embedding, decoder and loss as Megatron-LM has them, tok_embeddings, layers.0, norm and output as
    torchtitan. Raises InputError for what is none of these, and for ends of the model on other chunks than the first
    and the last.

    >>> layers_of_layout("Et*2|(ttt|)*2,tL"), layers_of_layout("tok_embeddings layers.0 | layers.1 norm output")
    ((2, 3, 3, 1), (1, 1))
    """
    has_words = re.search(r"[a-ln-su-z_.]", text)
    chunks = (
        [one.split() for one in text.split("|")] if has_words else [list(one) for one in _unrolled(text).split("|")]
    )
    modules = [part for chunk in chunks for part in chunk if part.startswith("layers.")]
    if modules != [f"layers.{number}" for number in range(len(modules))]:
        raise InputError("layers are not in the order of the model")
    found = [[_LAYER if part.startswith("layers.") else _PARTS.get(part, "") for part in chunk] for chunk in chunks]
    for part in ("", _PARTS["m"]):
        if any(part in chunk for chunk in found):
            raise InputError(f"a {part} is not simulated" if part else _EXPECTED)
    parts = [part for chunk in found for part in chunk if part not in {_LAYER, "norm"}]
    first, last = found[0], found[-1]
    ends = first[:1] == ["embedding"] and last[-1:] == ["head"] and not any("norm" in chunk for chunk in found[:-1])
    if parts != ["embedding", "head"] or not ends:
        raise InputError("the first chunk is expected to begin with the embedding, the last one to end with the head")
    return tuple([chunk.count(_LAYER) for chunk in found])


def wrong_layout(text: str) -> str:
    """Return what is wrong with a layout; nothing if it is one."""
    try:
        layers_of_layout(text)
    except InputError as error:
        return str(error)
    return ""


def _unrolled(text: str) -> str:
    """Return a text with what stands several times written out; raises InputError where that is too long."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        if sum(len(one[1]) * int(one[2]) for one in re.finditer(pattern, text)) > _MOST_PARTS:
            raise InputError(f"expected at most {_MOST_PARTS} parts")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text
