"""What is to be computed: the model and the batch.

B batch · S sequence (global) · H query heads · H_kv key/value heads · D head dim · E model dim · F feed-forward dim
L layers · V vocabulary · P = U * R context-parallel degree (Ulysses x ring)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sim.base.errors import InputError, unknown
from sim.base.presets import Name, converted, load_toml, preset_names, read_bytes
from sim.words.hugging_face import model_fields
from sim.words.options import SumOptions
from sim.words.patterns import Pattern

Dtype = Literal["fp64", "fp32", "bf16", "fp16", "int64"]
"""What a buffer holds. Integers, as token ids and labels, are cut and moved, and never summed."""
Scope = Literal["attention", "layer", "step"]
Pass = Literal["forward", "backward", "both"]
BiasName = Literal["qkv", "out", "mlp"]
QkNormName = Literal["head", "all"]
NormsName = Literal["after", "around"]
MlpKind = Literal["geglu", "gelu"]
LoraTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
MaskName = Literal["causal", "full"]

DTYPE_BYTES: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8}
FLOATS: tuple[Dtype, ...] = ("fp64", "fp32", "bf16", "fp16")
"""What is computed with."""

Count = Annotated[int, Meta(ge=1)]
MOST_HEADS, MOST_LAYERS, MOST_SEQUENCES = 2**10, 2**10, 2**20
"""Bounds beyond what anybody trains, below what takes hours and all memory to simulate."""
Heads = Annotated[int, Meta(ge=1, le=MOST_HEADS)]
Layers = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Features = Annotated[int, Meta(ge=1, le=2**24)]
Rate = Annotated[float, Meta(gt=0, lt=1e30)]


def accumulation_dtype(dtype: Dtype) -> Dtype:
    """Return promote(dtype, fp32): what partial results are added up in."""
    return dtype if dtype == "fp64" else "fp32"


class LayerKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields in which layers of one kind differ from what the model says of all."""

    window: Count | msgspec.UnsetType = msgspec.UNSET
    """A query sees itself and the W - 1 tokens before it."""
    rope_theta: Rate | msgspec.UnsetType = msgspec.UNSET
    rotary_dims: Annotated[int, Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """A decoder-only transformer."""

    name: Name
    embed_dim: Features
    num_layers: Layers
    num_heads: Heads
    num_kv_heads: Heads
    head_dim: Features
    ffn_dim: Features
    vocab_size: Features
    dtype: Dtype = "bf16"
    rope_theta: Rate = 10000.0
    """Base of the rotary embedding's wavelengths (arXiv:2104.09864 §3.2.2)."""
    norm_epsilon: Rate = 1e-5
    """What RMSNorm adds to the mean square."""
    tied_embeddings: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the embedding is the LM head, too (arXiv:1608.05859). Unset where it is not, for the reason of notes."""
    biases: tuple[BiasName, ...] | msgspec.UnsetType = msgspec.UNSET
    """Which linear layers have a bias; unset for none, as are all that follow."""
    qk_norm: QkNormName | msgspec.UnsetType = msgspec.UNSET
    """Whether q and k are normed behind their projections: each head by itself with one weight for all (Qwen3,
    arXiv:2505.09388 §2), or all heads as one (OLMo 2, arXiv:2501.00656 §3.3)."""
    norms: NormsName | msgspec.UnsetType = msgspec.UNSET
    """Where norms are: unset for those before attention and MLP; after them, before the residual (OLMo 2,
    arXiv:2501.00656 §3.2); or around, both (Gemma 2, arXiv:2408.00118 §2)."""
    mlp: MlpKind | msgspec.UnsetType = msgspec.UNSET
    """What an MLP computes: unset for SwiGLU; the same with GELU (arXiv:2002.05202); or GELU of one product. GELU is
    its approximation by tanh."""
    rotary_dims: Annotated[int, Meta(ge=0)] | msgspec.UnsetType = msgspec.UNSET
    """How many features of each head are rotated, the first ones; unset for all."""
    kinds: Annotated[tuple[LayerKind, ...], Meta(min_length=1, max_length=MOST_LAYERS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    """The kinds of the first layers, which repeat: windows layer by layer (arXiv:2408.00118 §2), layers without rotary
    embedding (arXiv:2501.18795 §3)."""
    parallel_residual: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether attention and MLP both read one norm of a layer's input (GPT-J; arXiv:2204.02311 §2)."""
    attention_scale: Rate | msgspec.UnsetType = msgspec.UNSET
    """What scores are multiplied by; unset for one over the root of head dim."""
    attention_softcap: Rate | msgspec.UnsetType = msgspec.UNSET
    """The largest score, towards which scores are bent by tanh (Gemma 2, arXiv:2408.00118 §2)."""
    logit_scale: Rate | msgspec.UnsetType = msgspec.UNSET
    """What logits are multiplied by."""
    logit_softcap: Rate | msgspec.UnsetType = msgspec.UNSET
    """As that of scores, of logits behind their scale."""
    embedding_scale: Rate | msgspec.UnsetType = msgspec.UNSET
    """What embeddings are multiplied by (arXiv:1706.03762 §3.4)."""
    residual_scale: Rate | msgspec.UnsetType = msgspec.UNSET
    """What attention and MLP are multiplied by before they are added to the residual (Granite)."""
    lora_rank: Annotated[int, Meta(ge=1, le=2**16)] | msgspec.UnsetType = msgspec.UNSET
    """Rank of adapters beside linear layers, which alone are trained: y = W x + (alpha / rank) B (A x), where all
    weights of the model are frozen (LoRA, arXiv:2106.09685 §4.1). Unset where they are trained."""
    lora_alpha: Rate | msgspec.UnsetType = msgspec.UNSET
    """The alpha of that; unset for the rank, so that the factor is 1."""
    lora_targets: Annotated[tuple[LoraTarget, ...], Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    """Which linear layers have adapters; unset for all of them but the head, as peft's all-linear."""
    source: str = "given by the user"
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """What the model has and predictions leave out, for their evidence. Unset, not empty, where there is nothing: then
    it is not in the JSON of schedules, whose hashes are those of before there were notes."""

    def __post_init__(self) -> None:
        """Raise InputError where query heads do not divide among the key/value heads, or lines of the block do not go
        together.
        """
        if self.num_heads % self.num_kv_heads:
            allowed = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise InputError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}: allowed are "
                f"{', '.join(map(str, allowed))}; set it with `set` model.num_kv_heads=N"
            )
        if self.rotary_dims and (self.rotary_dims % 2 or self.rotary_dims > self.head_dim):
            raise InputError(
                f"rotary_dims {self.rotary_dims}: expected an even number of at most head_dim {self.head_dim}; set it "
                f"in the model's file"
            )
        if self.parallel_residual and (self.norms or self.residual_scale):
            raise InputError("parallel_residual with norms behind or residual_scale: allowed is one norm before both")
        if self.norms and self.residual_scale:
            raise InputError(f"residual_scale with norms {self.norms}: allowed is one of both")
        if not self.lora_rank and (self.lora_alpha or self.lora_targets):
            raise InputError(
                "lora_alpha and lora_targets are of adapters, and there are none: leave them out, or set a rank with "
                "`set` model.lora_rank=N"
            )
        if self.mlp == "gelu" and "gate" in (self.lora_targets or ()):
            raise InputError("lora_targets has gate, and an MLP of gelu none: allowed are q, k, v, o, up and down")
        if self.parallel_residual and {"out", "mlp"} <= {*(self.biases or ())}:
            raise InputError(
                "parallel_residual with biases of out and mlp, whose gradients are one: allowed is one of both"
            )

    @property
    def is_frozen(self) -> bool:
        """Whether its own weights are frozen, and only adapters are trained."""
        return bool(self.lora_rank)


class BlockMask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """Which blocks of keys each block of queries attends to, of all sequences and heads alike."""

    size: Count
    """Tokens of a block; the last one may have fewer."""
    kept: tuple[tuple[int, ...], ...]
    """Per block of queries the numbers of the blocks of keys that it keeps, rising, its own among them."""

    def __post_init__(self) -> None:
        """Raise InputError for blocks that are no blocks of the sequence, or a block that does not see itself."""
        for row, blocks in enumerate(self.kept):
            if list(blocks) != sorted(set(blocks)) or not all(0 <= block < len(self.kept) for block in blocks):
                raise InputError(
                    f"`block_mask`: block {row} of queries keeps {_shortened(blocks)}: expected rising numbers of "
                    f"blocks of keys, each 0 to {len(self.kept) - 1}"
                )
            if row not in blocks:
                raise InputError(
                    f"`block_mask`: block {row} of queries keeps {_shortened(blocks)}: expected {row} among them, so "
                    f"that each token attends to itself"
                )


def _shortened(blocks: tuple[int, ...]) -> str:
    few = ", ".join(map(str, blocks[:8]))
    return f"[{few}{', …' if len(blocks) > 8 else ''}]"


class PackedSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True):
    """What one sequence of a batch holds, where each has documents of its own."""

    documents: Annotated[tuple[int, ...], Meta(min_length=1)]
    """Tokens of each document, in order."""
    padding: Annotated[int, Meta(ge=0)] = 0
    """How many tokens behind them only fill up the layout."""

    @property
    def seq(self) -> int:
        """Tokens of the sequence."""
        return sum(self.documents) + self.padding


def require_seed(seed: object) -> None:
    """Raise InputError for what is no seed of numpy and torch."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"`seed` {seed}: expected a whole number from 0 to 2^63 - 1")


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step's work of one context-parallel group; data-parallel replicas have sequences of their own each."""

    model: ModelSpec
    seq: Count
    """Global sequence length S in tokens."""
    batch: Count = 1
    """Sequences per context-parallel group."""
    mask: MaskName = "causal"
    window: Count | None = None
    """Sliding window: a query sees itself and the W - 1 tokens before it (with mask full also those after it)."""
    documents: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Tokens of each document of a packed sequence, in order; all sequences share them. No token attends to another
    document, positions restart in each, and its last token has no label. Unset where there is one: then it is not in
    the JSON of schedules, whose hashes are those of before there were documents."""
    sequences: tuple[PackedSequence, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of a batch whose sequences have documents of their own, and may differ in length, what each holds; replicas have
    the same. ``seq`` is then the longest, and each is a micro-batch. Unset where all are alike."""
    block_mask: BlockMask | msgspec.UnsetType = msgspec.UNSET
    """Of what ``mask`` and ``window`` keep, the blocks that are kept. Unset where it is all of it."""
    pattern: Pattern | msgspec.UnsetType = msgspec.UNSET
    """Of what a causal mask keeps of each document, what is kept. Unset where it is all of it."""
    attention: Literal["linear"] | msgspec.UnsetType = msgspec.UNSET
    """What attention computes, unset for softmax: a schedule of another function says so itself."""
    padding: Annotated[int, Meta(ge=0)] = 0
    """How many of the last tokens of ``seq`` only fill up the layout: zeros, with gradients of zero."""
    dtype: Dtype = "fp32"
    scope: Scope = "attention"
    """attention: q, k, v in, out; layer: whole transformer layers, tokens in, tokens out; step: a training step, token
    ids and labels in, losses, updated weights and moments out."""
    layers: Count = 1
    passes: Pass = "both"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for what no schedule can play."""
        for name, most in (("layers", MOST_LAYERS), ("batch", MOST_SEQUENCES)):
            if not 1 <= (given := getattr(self, name)) <= most:
                raise InputError(f"`{name}` {given}: expected 1 to {most}")
        require_seed(self.seed)
        if self.dtype not in FLOATS:
            raise unknown("data type", self.dtype, FLOATS, "`dtype`")
        if self.scope == "attention" and self.layers != 1:
            raise InputError(f"{self.layers} layers: the scope attention plays one; set `layers` 1, or `scope` layer")
        if not 0 <= self.padding < self.seq or (self.padding and self.mask != "causal"):
            raise InputError(
                f"{self.padding} tokens of padding in {self.seq} under mask {self.mask}: under a causal mask the last "
                f"tokens may be padding, since no other sees them; set `mask` causal, or a `seq` that divides"
            )
        self._require_documents()
        self._require_sequences()
        self._require_block_mask()
        self._require_pattern()
        if self.scope == "layer" and self.passes == "backward":
            raise InputError("pass backward: layers need their forward pass; set `passes` both, or `scope` attention")
        if self.scope == "step" and self.passes != "both":
            raise InputError(f"pass {self.passes}: a training step has both; set `passes` both, or `scope` layer")
        if self.scope == "step" and self.num_labels < 1:
            what = "documents of 1 token each have" if self.documents else "a sequence of 1 token has"
            raise InputError(f"{what} no next one to predict: set a longer `seq`")

    def _require_documents(self) -> None:
        """Raise InputError for documents without tokens, or that do not fill the sequence."""
        if self.documents is msgspec.UNSET:
            return
        for index, size in enumerate(self.documents):
            if size < 1:
                raise InputError(f"`documents`: document {index} has {size} tokens: expected 1 or more; leave it out")
        if sum(self.documents) != self.real_seq:
            raise InputError(
                f"`documents` have {sum(self.documents)} tokens in all: expected the {self.real_seq} of the sequence; "
                f"set `seq` to their sum"
            )

    def _require_sequences(self) -> None:
        """Raise InputError for sequences that are not those of the batch, or beside what is of all of them."""
        if self.sequences is msgspec.UNSET:
            return
        if self.scope != "step" or self.attention is not msgspec.UNSET:
            raise InputError(
                "`documents` of each micro-batch are of training steps with softmax attention: set `scope` step, or "
                "documents that all sequences share"
            )
        if self.documents is not msgspec.UNSET or self.padding or self.block_mask is not msgspec.UNSET:
            raise InputError("`sequences` have documents and padding of their own: leave out those of all, and blocks")
        for number, one in enumerate(self.sequences):
            if any(size < 1 for size in one.documents):
                raise InputError(f"`documents` {one.documents} of micro-batch {number}: expected 1 token or more each")
        longest = max(one.seq for one in self.sequences) if self.sequences else 0
        if (len(self.sequences), longest) != (self.batch, self.seq):
            raise InputError(
                f"{len(self.sequences)} sequences of up to {longest} tokens: expected the {self.batch} of the `batch`, "
                f"of up to {self.seq}"
            )
        for form in self.forms:
            form.__post_init__()

    def _require_block_mask(self) -> None:
        """Raise InputError for a block mask of another length, or beside what it is not combined with."""
        mask = self.block_mask
        if mask is msgspec.UNSET:
            return
        if self.documents is not msgspec.UNSET or self.padding:
            raise InputError(
                "`block_mask` is of one sequence without padding: leave out `documents` and `pad`, or `block_mask`"
            )
        if (blocks := -(-self.seq // mask.size)) != len(mask.kept):
            raise InputError(
                f"`block_mask` has {len(mask.kept)} blocks of queries: `seq` {self.seq} has {blocks} of {mask.size} "
                f"tokens; set `seq`, or change the mask"
            )

    def _require_pattern(self) -> None:
        """Raise InputError for a pattern beside what it is not combined with."""
        beside = self.window is not None or self.block_mask is not msgspec.UNSET or self.padding
        if self.pattern is not msgspec.UNSET and (self.mask != "causal" or beside):
            raise InputError(
                f"`mask` {self.pattern} is of what a causal mask keeps of whole documents: leave out `window`, "
                f"`block_mask` and `pad`, or set `mask` causal"
            )

    def of_layer(self, layer: int) -> Workload:
        """Return the workload of a model all of whose layers are of the kind of one: itself where all are alike."""
        kinds = self.model.kinds
        return _of_kind(self, layer % len(kinds)) if kinds else self

    def kinds(self, layers: int | None = None) -> tuple[tuple[Workload, int], ...]:
        """Return the workload of each kind of layers, and how many of ``layers`` are of that kind; by default of its
        own.
        """
        period = len(self.model.kinds or (None,))
        count = self.layers if layers is None else layers
        return tuple([(self.of_layer(one), len(range(one, count, period))) for one in range(period)])

    def of_sequence(self, number: int) -> Workload:
        """Return the workload of one sequence of the global batch: itself where all are alike."""
        return self.forms[self.form_of(number)] if self.sequences else self

    @property
    def forms(self) -> tuple[Workload, ...]:
        """The workloads of sequences that differ, each once; itself where all are alike."""
        return tuple([_of_packed(self, one) for one in dict.fromkeys(self.sequences)]) if self.sequences else (self,)

    def form_of(self, number: int) -> int:
        """Return which of these forms a sequence of the global batch has."""
        return _forms(self.sequences)[number % self.batch] if self.sequences else 0

    @property
    def has_window(self) -> bool:
        """Whether some layers have a window."""
        return self.window is not None or any(one.window for one, _ in self.kinds())

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Tokens of each document; those of the sequence where it is one."""
        return (self.real_seq,) if self.documents is msgspec.UNSET else self.documents

    @property
    def real_seq(self) -> int:
        """Tokens of the sequence that are not padding."""
        return self.seq - self.padding

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences of one group."""
        return sum([one.seq for one in self.sequences]) if self.sequences else self.batch * self.seq

    @property
    def num_real_tokens(self) -> int:
        """Those of them that are not padding."""
        return sum([sum(one.documents) for one in self.sequences]) if self.sequences else self.batch * self.real_seq

    @property
    def num_labels(self) -> int:
        """Tokens of one group that have a next one to predict."""
        if self.sequences:
            return self.num_real_tokens - sum([len(one.documents) for one in self.sequences])
        return self.batch * (self.real_seq - len(self.document_lengths))

    @property
    def forward(self) -> bool:
        """Whether the forward pass is part of the schedule."""
        return self.passes != "backward"

    @property
    def backward(self) -> bool:
        """Whether the backward pass is part of the schedule."""
        return self.passes != "forward"


@lru_cache(maxsize=256)
def _forms(sequences: tuple[PackedSequence, ...]) -> tuple[int, ...]:
    """Return which of those that differ each sequence is."""
    found = {one: number for number, one in enumerate(dict.fromkeys(sequences))}
    return tuple([found[one] for one in sequences])


@lru_cache(maxsize=4096)
def _of_packed(workload: Workload, one: PackedSequence) -> Workload:
    documents = one.documents if len(one.documents) > 1 else msgspec.UNSET
    return msgspec.structs.replace(
        workload, seq=one.seq, batch=1, sequences=msgspec.UNSET, documents=documents, padding=one.padding
    )


@lru_cache(maxsize=256)
def _of_kind(workload: Workload, number: int) -> Workload:
    model, seq = workload.model, workload.seq
    assert model.kinds
    given = msgspec.structs.asdict(model.kinds[number])
    own = {name: value for name, value in given.items() if value is not msgspec.UNSET}
    window = min(own.pop("window", seq), workload.window or seq)
    alike = msgspec.structs.replace(model, kinds=msgspec.UNSET, **own)
    return msgspec.structs.replace(workload, model=alike, window=window if window < seq else None)


def gradient_dtype(workload: Workload, options: SumOptions) -> Dtype:
    """Return the data type in which partial gradients are summed and sent."""
    return accumulation_dtype(workload.dtype) if options.gradients == "fp32" else workload.dtype


def parse_length(text: str, where: str) -> int:
    """Return a length in tokens: ``8192``, ``8K`` (x 1024) or ``1M`` (x 1024^2), as the field writes them."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KkMm]?)", text.strip())
    length = float(match[1]) * {"": 1, "K": 1024, "M": 1024**2}[match[2].upper()] if match else 0.0
    if not 1 <= length < 2**53 or length != int(length):
        raise InputError(f"{where} {text}: expected a positive whole number of tokens such as 8192, 8K or 1M")
    return int(length)


def load_model(name: str, ignored: Sequence[str] = ()) -> ModelSpec:
    """Return the model of a preset, of a TOML file, or of a ``config.json`` as Hugging Face writes it, of which some
    keys are ``ignored``.
    """
    if name.endswith(".json"):
        return model_of_config(name, read_bytes("model", name, "`model`"), ignored)
    if ignored:
        raise InputError(f"`set` model.ignore={'+'.join(ignored)}: {name!r} is no config.json")
    return load_toml("model", _preset(name), ModelSpec, _MODELS, "`model`")


def model_of_config(name: str, data: bytes, ignored: Sequence[str] = ()) -> ModelSpec:
    """Return the model that the content of the ``config.json`` called ``name`` describes."""
    fields = model_fields(name, data, ignored)
    return converted(fields, ModelSpec, f"model {name!r}", "`model` takes a Hugging Face config.json")


_MODELS = "sim/models"
_IDLE = {"base", "chat", "hf", "instruct", "it", "meta"}
"""Words of names that say how a model was trained on, which changes nothing here."""


def spoken(name: str) -> str:
    """Return a model's name without what people write in several ways.

    >>> spoken("meta-llama/Meta-Llama-3.1-8B-Instruct"), spoken("llama3.1-8b")
    ('llama3.18b', 'llama3.18b')
    """
    words = re.split("[-_ ]+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _IDLE)


@lru_cache(maxsize=1)
def _presets() -> dict[str, str]:
    return {spoken(preset): preset for preset in preset_names(_MODELS)}


def _preset(name: str) -> str:
    """Return the preset that a name means, or a path as it is; raises InputError for a name as on a hub that is none
    of both.
    """
    if name.endswith(".toml"):
        return name
    if spoken(name) in _presets():
        return _presets()[spoken(name)]
    of_hub = re.fullmatch(r"\w[\w.-]{0,99}/[\w.-]{1,100}", name) and not Path(name).exists()
    if of_hub or "/" not in name:
        raise unknown("model", name.rpartition("/")[2].lower(), [*preset_names(_MODELS), "FILE.toml"], "`model`")
    return name
