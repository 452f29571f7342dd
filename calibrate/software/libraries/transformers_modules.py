"""The modules of Hugging Face's decoder layers, as they run eagerly."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from calibrate.software.counting.count import Ready, Run, missing, received, run
from calibrate.software.counting.sizes import Sizes

FAMILIES = ("llama", "qwen2", "qwen3")
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Modules(NamedTuple):
    """A family of models, and how its layers are run."""

    family: str
    autocast: bool
    """fp32 weights and residual stream under autocast of bf16; otherwise everything is bf16."""

    @property
    def code(self) -> Any:
        """The family's module of transformers."""
        return _module(f"models.{self.family}.modeling_{self.family}")

    def named(self, name: str) -> Any:
        """Return a class of the family, by its name without the family's."""
        return getattr(self.code, _CLASSES[self.family] + name)

    def config(self, sizes: Sizes) -> Any:
        """Return the configuration of a layer of given sizes."""
        code = _module(f"models.{self.family}.configuration_{self.family}")
        return getattr(code, _CLASSES[self.family] + "Config")(
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["ffn"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            num_hidden_layers=1,
            vocab_size=sizes["vocab"],
            attn_implementation="sdpa",
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, and of what goes from layer to layer."""
        return torch.float32 if self.autocast else torch.bfloat16

    def run(self, build: Callable[[Modules, Sizes], Ready], sizes: Sizes) -> Run:
        """Return what a part runs."""
        with default_type(self.dtype):
            if not self.autocast:
                return run(lambda given: build(self, given), sizes)
            return run(lambda given: _cast(build(self, given)), sizes, fake=True)


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Make weights of a type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _module(name: str) -> Any:
    """Return a module of transformers, imported when it is asked for; raises InputError if it is not installed."""
    try:
        return importlib.import_module(f"transformers.{name}")
    except ModuleNotFoundError as error:
        raise missing("transformers") from error


def _cast(ready: Ready) -> Ready:
    def under() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ready.run()

    return ready._replace(run=under)


def layer(modules: Modules, sizes: Sizes) -> Ready:
    """Return a whole decoder layer."""
    module, x, angles = layer_of(modules, sizes)
    return Ready(lambda: (module(x, position_embeddings=angles),), (x,))


def layer_of(modules: Modules, sizes: Sizes) -> tuple[torch.nn.Module, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return a decoder layer with what it is given: the residual stream, cosines and sines."""
    return modules.named("DecoderLayer")(modules.config(sizes), 0), _stream(modules, sizes), _angles(modules, sizes)


def attention(modules: Modules, sizes: Sizes) -> Ready:
    """Return the attention module: with its products, norms and rotary embedding."""
    module = modules.named("Attention")(modules.config(sizes), 0)
    x, angles = _normed(modules, sizes), _angles(modules, sizes)
    return Ready(lambda: (module(x, position_embeddings=angles, attention_mask=None)[0],), (x,))


def mlp(modules: Modules, sizes: Sizes) -> Ready:
    """Return the MLP."""
    module = modules.named("MLP")(modules.config(sizes))
    x = _normed(modules, sizes)
    return Ready(lambda: (module(x),), (x,))


def norm(modules: Modules, sizes: Sizes) -> Ready:
    """Return the norm before attention, and before the MLP."""
    module = modules.named("RMSNorm")(sizes["hidden"])
    x = _stream(modules, sizes)
    return Ready(lambda: (module(x),), (x,))


def query_norm(modules: Modules, sizes: Sizes) -> Ready:
    """Return the norm of each query head."""
    return _head_norm(modules, sizes, "heads")


def key_norm(modules: Modules, sizes: Sizes) -> Ready:
    """Return the norm of each key head."""
    return _head_norm(modules, sizes, "kv_heads")


def _head_norm(modules: Modules, sizes: Sizes, heads: str) -> Ready:
    module = modules.named("RMSNorm")(sizes["head_dim"])
    x = received(torch.bfloat16, sizes["batch"], sizes["sequence"], sizes[heads], sizes["head_dim"])
    return Ready(lambda: (module(x),), (x,))


def rotary(modules: Modules, sizes: Sizes) -> Ready:
    """Return the rotary embedding of queries and keys."""
    shape = sizes["batch"], sizes["sequence"], sizes["head_dim"]
    dtype = torch.bfloat16 if modules.family != "qwen3" else modules.dtype  # what the norm of heads returns
    order = (received(dtype, *shape[:2], sizes[heads], shape[2]) for heads in ("heads", "kv_heads"))
    q, k = (one.transpose(1, 2) for one in order)
    cos, sin = _angles(modules, sizes)
    return Ready(lambda: modules.code.apply_rotary_pos_emb(q, k, cos, sin), (q, k))


def residual(modules: Modules, sizes: Sizes) -> Ready:
    """Return a sum onto the residual stream, whose gradient comes from what follows and from the branch."""
    x = _stream(modules, sizes)
    branch = received(torch.bfloat16, *x.shape)
    return Ready(lambda: (x + branch, x.view_as(x)), (x, branch))


def attention_alone(modules: Modules, sizes: Sizes) -> Run:
    """Return the attention module without what is counted as parts of their own: products, glue, and what is kept."""
    parts = [rotary, query_norm, key_norm] if modules.family == "qwen3" else [rotary]
    found = modules.run(attention, sizes).without(*(modules.run(one, sizes) for one in parts))
    return found.without(biases_alone(modules, sizes)) if modules.family == "qwen2" else found


def biases_alone(modules: Modules, sizes: Sizes) -> Run:
    """Return what linear modules of queries, keys and values run with biases, and not without."""
    with_bias, without = (
        modules.run(functools.partial(_linears, bias), sizes).without_products() for bias in (True, False)
    )
    return with_bias.without(without)


def _linears(bias: bool, modules: Modules, sizes: Sizes) -> Ready:
    given = []
    for heads in ("heads", "kv_heads", "kv_heads"):
        module = torch.nn.Linear(sizes["hidden"], sizes[heads] * sizes["head_dim"], bias=bias)
        given.append((module, _normed(modules, sizes)))
    return Ready(lambda: tuple(module(x) for module, x in given), tuple(x for _, x in given))


def embedding(modules: Modules, sizes: Sizes) -> Ready:  # noqa: ARG001 - as all parts are called
    """Return the embedding of tokens."""
    module = torch.nn.Embedding(sizes["vocab"], sizes["hidden"])
    tokens = torch.empty(sizes["batch"], sizes["sequence"], dtype=torch.int64)
    return Ready(lambda: (module(tokens),))


def loss(modules: Modules, sizes: Sizes) -> Ready:
    """Return the loss with the head that it needs; whoever trains keeps no logits, as Trainer does not."""
    found = _module("loss.loss_utils").ForCausalLMLoss
    head = torch.nn.Linear(sizes["hidden"], sizes["vocab"], bias=False)
    x = _normed(modules, sizes)
    labels = torch.empty(x.shape[:2], dtype=torch.int64)
    return Ready(lambda: (found(head(x), labels, sizes["vocab"]),), (x,))


def _stream(modules: Modules, sizes: Sizes) -> torch.Tensor:
    """Return the residual stream."""
    return received(modules.dtype, sizes["batch"], sizes["sequence"], sizes["hidden"])


_normed = _stream
"""What a norm returns has the type of its weight."""


def _angles(modules: Modules, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of positions, which all sequences share."""
    cos, sin = (torch.empty(1, sizes["sequence"], sizes["head_dim"], dtype=modules.dtype) for _ in range(2))
    return cos, sin
