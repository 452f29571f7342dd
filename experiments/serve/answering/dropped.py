"""What is dropped on a page: a model, a cluster, lengths of documents, or what a framework was configured with.

Its content tells which of these it is. Files are data: nothing in them is run, and no file that they name is opened.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from experiments.serve.answering.question import (
    MOST_DOCUMENTS,
    Content,
    Dropped,
    FileName,
    Question,
    cluster_in,
    model_in,
    question_of,
    require_model,
)
from sim.base.errors import InputError, unknown
from sim.base.presets import preset_names
from sim.batches.files import lengths_in
from sim.batches.lengths import draw, histogram
from sim.setup.imports.frameworks import framework_of
from sim.setup.imports.imported import Imported
from sim.setup.imports.reading import file_of
from sim.setup.names import tokens

DISTRIBUTIONS = "sim/batches/distributions"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was dropped, and the question that it changes."""

    name: FileName
    text: Content
    question: Question
    anyway: bool = False
    """Whether what a configuration says and is not simulated is left out."""


class Drawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents that are drawn from a distribution that ships, as many as fill the length."""

    distribution: Annotated[str, Meta(max_length=60)]
    question: Question
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0


def read(file: File) -> dict[str, Any]:
    """Return the question with what a file says, what it was taken for, and what is to be said of it; raises
    InputError for what is none of the known kinds.
    """
    kind = _kind(file)
    dropped = Dropped(file.name, file.text)
    told: list[str] = []
    if kind == "model":
        spec = model_in(dropped)
        told = [*(spec.notes or ())]
        question = msgspec.structs.replace(file.question, model=dropped)
    elif kind == "cluster":
        cluster_in(dropped)
        question = msgspec.structs.replace(file.question, cluster=dropped)
    elif kind == "documents":
        question = _with_documents(file.question, lengths_in(file.name, file.text.encode()))
    else:
        question, told = _configured(file)
    return {"question": question, "kind": kind, "told": told}


def drawn(asked: Drawn) -> dict[str, Any]:
    """Return the question with documents drawn; raises InputError for an unknown distribution."""
    if asked.distribution not in (known := preset_names(DISTRIBUTIONS)):
        raise unknown("distribution", asked.distribution, known, "`documents`")
    size = tokens("seq", asked.question.seq)
    lengths = draw(histogram(asked.distribution), size, asked.seed)
    told = [f"{len(lengths)} documents of {asked.distribution}, seed {asked.seed}"]
    return {"question": _with_documents(asked.question, lengths), "kind": "documents", "told": told}


def _kind(file: File) -> str:
    """Return what a file is: a model, a cluster, documents or a configuration."""
    ending = file.name.rpartition(".")[2].lower()
    if ending in {"txt", "jsonl"}:
        return "documents"
    try:
        if ending == "json":
            found = msgspec.json.decode(file.text.encode())
            of_model = isinstance(found, dict) and {"model_type", "hidden_size"} & {*found}
            return "model" if of_model and "per_device_train_batch_size" not in found else "configuration"
        if ending == "toml":
            found = msgspec.toml.decode(file.text)
            return "cluster" if "gpus_per_node" in found else "model" if "num_layers" in found else "configuration"
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{file.name!r}: {error}; drop a file that is whole") from error
    return "configuration"


def _with_documents(question: Question, lengths: tuple[int, ...]) -> Question:
    """Return a question about documents; under a causal mask a sum that does not divide is padded."""
    if len(lengths) > MOST_DOCUMENTS:
        raise InputError(f"{len(lengths)} documents: a page takes at most {MOST_DOCUMENTS}; leave out some")
    return msgspec.structs.replace(
        question, documents=lengths, seq=sum(lengths), pad=question.pad or question.mask == "causal"
    )


def _configured(file: File) -> tuple[Question, list[str]]:
    """Return the question that a configuration is, on the cluster of the present one, and what was assumed."""
    read_ = file_of(file.name, file.text.encode())
    found = Imported((read_,), (framework_of(read_),), file.anyway)
    named = found.understood.facts.get("model")
    if named is not None:
        require_model(named.value)
    on = file.question.cluster
    answer = found.answer(cluster=on if isinstance(on, str) else cluster_in(on))
    question = question_of(answer.setup, cluster=None if isinstance(on, str) else on)
    return question, [f"from {found.title}", *answer.assumptions]
