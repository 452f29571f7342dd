"""Tables of what pieces of software run, as ``sim/software/counted`` has them."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata

import torch

from calibrate.software import frameworks
from calibrate.software.counting import losses, optimisers
from calibrate.software.counting.asked import Asked, Software
from calibrate.software.counting.count import Ready, missing
from calibrate.software.counting.log import Call, Operand
from calibrate.software.counting.sizes import TO_CHECK, TO_DERIVE, Sizes, formula, numbers, terms
from calibrate.software.libraries import compiled, liger, transformers_modules
from calibrate.software.libraries.transformers_modules import FAMILIES, Modules
from sim.base.errors import unknown
from sim.software.counted import MARK, Counted, DtypeName, Formula, Kernel, Part, Pass, Product, amount

DTYPES: dict[torch.dtype, DtypeName] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.bool: "bool", torch.complex64: "fp32",
}  # fmt: skip


def counted(name: str) -> Counted:
    """Return what a piece of software runs with the versions that are installed.

    Raises InputError if there is none of the name, or a package is missing.
    """
    if name not in SOFTWARE:
        raise unknown("software", name, SOFTWARE, "NAME of longstep count")
    software = SOFTWARE[name]()
    return Counted(
        software=software.what,
        versions={package: version(package) for package in software.packages},
        command=f"longstep count {name}",
        created=datetime.now(UTC).date().isoformat(),
        parts={part: derived(part, asked) for part, asked in software.parts.items()},
    )


def version(package: str) -> str:
    """Return the version of a package, without the name of its build; raises InputError if it is not installed."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError as error:
        raise missing(package) from error


def derived(name: str, asked: Asked) -> Part:
    """Return a part with formulas that hold at every size; raises ValueError where one does not."""
    found = asked.run(TO_DERIVE)
    passes = {"step" if asked.step else "forward": _pass(found.forward), "backward": _pass(found.backward)}
    part = Part(
        what=asked.what,
        kept=formula(found.kept),
        peak=formula(one.operand for one in found.peak) if asked.peak else {},
        **passes,
    )
    for sizes in TO_CHECK:
        other = asked.run(sizes)
        for pass_, calls in (
            (passes[key], run) for key, run in zip(passes, (other.forward, other.backward), strict=True)
        ):
            if _at(pass_, sizes) != Counter(map(_measured, calls)):
                raise ValueError(f"{name}: kernels at {sizes} are not those of the formulas")
        amounts = [(part.kept, other.kept), (part.peak, [one.operand for one in other.peak] if asked.peak else [])]
        if any(amount(of, sizes) != _bytes(operands) for of, operands in amounts):
            raise ValueError(f"{name}: what is allocated at {sizes} is not that of the formulas")
    return part


Measured = tuple[str, DtypeName, float, float, float | None]
"""A launch: its kernel, the type and bytes that it writes after those that it reads, and FLOPs of a product."""


def _at(of: Pass, sizes: Sizes) -> Counter[Measured]:
    """Return the launches of a pass at a size."""
    found = Counter[Measured]()
    for one in (*of.kernels, *of.products):
        flops = amount(one.flops, sizes) if isinstance(one, Product) else None
        found[one.kernel, one.dtype, amount(one.reads, sizes), amount(one.writes, sizes), flops] += one.launches
    return found


def _measured(call: Call) -> Measured:
    return call.kernel, DTYPES[call.dtype], _bytes(call.reads), _bytes(call.writes), call.flops


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(one.elements * one.itemsize for one in operands)


def _pass(calls: Iterable[Call]) -> Pass:
    """Return what ran, like launches once."""
    found = Counter(call._replace(reads=tuple(sorted(call.reads))) for call in calls)
    kernels = tuple(_kernel(call, launches) for call, launches in found.items() if call.flops is None)
    products = tuple(_product(call, launches) for call, launches in found.items() if call.flops is not None)
    return Pass(kernels=kernels, products=products)


def _kernel(call: Call, launches: int) -> Kernel:
    reads, writes = formula(call.reads), formula(call.writes)
    return Kernel(
        kernel=call.kernel, dtype=DTYPES[call.dtype], launches=launches, reads=reads, writes=writes,
        scattered=call.scattered,
    )  # fmt: skip


def _product(call: Call, launches: int) -> Product:
    assert call.flops is not None
    like, flops = _kernel(call, launches), numbers(dict(terms(call.flops)))
    return Product(
        kernel=like.kernel, dtype=like.dtype, launches=launches, reads=like.reads, writes=like.writes, flops=flops
    )


def _family(modules: Modules) -> Software:
    """Return the modules of a family of models of transformers."""
    code = f"transformers.models.{modules.family}.modeling_{modules.family}"

    def part(build: Callable[[Modules, Sizes], Ready], what: str, *, peak: bool = False) -> Asked:
        return Asked(what, functools.partial(modules.run, build), peak)

    heads = modules.family == "qwen3"
    parts = {
        "norm": part(transformers_modules.norm, f"{modules.named('RMSNorm').__name__}: before attention and the MLP"),
        "residual": part(transformers_modules.residual, "residual + hidden_states, and both gradients added"),
        "rotary": part(transformers_modules.rotary, "apply_rotary_pos_emb on queries and keys"),
        "attention": Asked(
            f"{modules.named('Attention').__name__} with SDPA's flash kernel, less its norms, rotary and biases",
            functools.partial(transformers_modules.attention_alone, modules),
        ),
        "mlp": part(transformers_modules.mlp, modules.named("MLP").__name__),
        "embedding": part(transformers_modules.embedding, "torch.nn.Embedding of tokens"),
        "loss": part(transformers_modules.loss, "lm_head and ForCausalLMLoss; logits not kept", peak=True),
    }
    if heads:
        parts["query_norm"] = part(transformers_modules.query_norm, "q_norm of Qwen3Attention")
        parts["key_norm"] = part(transformers_modules.key_norm, "k_norm of Qwen3Attention")
    if modules.family == "qwen2":
        parts["bias"] = Asked(
            "biases of q_proj, k_proj and v_proj, where they are no part of a product",
            functools.partial(transformers_modules.biases_alone, modules),
        )
    how = "fp32 weights and residual stream under autocast of bf16" if modules.autocast else "bf16 weights, no autocast"
    return Software(f"{code}, eager, {how}", ("torch", "transformers"), parts)


def _compiled(family: str) -> Software:
    """Return the layers of a family as torch.compile has them, each as one."""
    modules = Modules(family, autocast=False)
    what = f"{modules.named('DecoderLayer').__name__} with SDPA's flash kernel; kernels by Inductor's rule of fusion"
    code = f"transformers.models.{family}.modeling_{family}, compiled by layers, bf16 weights, no autocast"
    return Software(code, ("torch", "transformers"), {"layer": Asked(what, functools.partial(compiled.layer, modules))})


def _losses() -> Software:
    return Software(
        "losses of torch with the head before them, eager, bf16 logits",
        ("torch",),
        {
            "loss": Asked(
                "torchtitan: cross_entropy(pred.flatten(0, 1).float(), labels)", losses.torchtitan, peak=True
            ),
            "chunk": Asked(
                "each chunk of a loss by chunks, logits recomputed; splitting hidden states is not in it",
                losses.chunk,
                peak=True,
            ),
        },
    )


def _optimisers() -> Software:
    parts = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = DTYPES[dtype]
        for how in optimisers.HOWS:
            of = "each parameter tensor" if how == "for-loop" else "all parameters of a type"
            count = functools.partial(optimisers.adamw, how, dtype)
            what = f"AdamW {how} of {of}, states and gradients in {name}"
            parts[f"adamw-{how}-{name}"] = Asked(what, count, peak=True, step=True)
        what = f"clip_grad_norm_ with foreach of gradients in {name}"
        parts[f"clip-{name}"] = Asked(what, functools.partial(optimisers.clip, dtype), peak=True, step=True)
    return Software("steps of torch.optim.AdamW, and clip_grad_norm_", ("torch",), parts)


def _liger() -> Software:
    """Return Liger's modules as they are written down of one version, which need not be installed."""
    parts = {
        "norm": Asked("LigerRMSNorm, in place in backward", liger.norm),
        "rotary": Asked("liger_rotary_pos_emb on queries and keys, in place", liger.rotary),
        "attention": Asked("LlamaAttention with SDPA's flash kernel and that, less the rotary", liger.attention),
        "mlp": Asked("LigerSwiGLUMLP", liger.mlp),
        "loss": Asked(
            "LigerFusedLinearCrossEntropy beside its chunks; divided by the labels, as Trainer does",
            liger.loss,
            peak=True,
        ),
        "chunk": Asked("each chunk of LigerFusedLinearCrossEntropy, in forward", liger.chunk, peak=True),
    }
    what = f"liger-kernel {liger.VERSION} as its code has it, bf16 weights, no autocast"
    return Software(what, ("torch", "transformers"), parts)


SOFTWARE: Mapping[str, Callable[[], Software]] = {
    **{f"transformers-{family}": functools.partial(_family, Modules(family, autocast=False)) for family in FAMILIES},
    **{
        f"transformers-{family}-autocast": functools.partial(_family, Modules(family, autocast=True))
        for family in FAMILIES
    },
    **{f"transformers-{family}-compiled": functools.partial(_compiled, family) for family in FAMILIES},
    "liger": _liger,
    "torch-losses": _losses,
    "torch-optimisers": _optimisers,
    **frameworks.SOFTWARE,
}
"""What can be counted, by the name of its table."""


def encoded(table: Counted) -> bytes:
    """Return a table as TOML, a kernel a line."""
    lines = [MARK, f"software = {_text(table.software)}"]
    lines += [f"command = {_text(table.command)}", f"created = {_text(table.created)}", "", "[versions]"]
    lines += [f"{package} = {_text(one)}" for package, one in table.versions.items()]
    for name, part in table.parts.items():
        lines += ["", f"[parts.{name}]", f"what = {_text(part.what)}"]
        lines += [f"{key} = {_inline(getattr(part, key))}" for key in ("kept", "peak") if getattr(part, key)]
        for key in ("forward", "backward", "step"):
            if of := _lines(getattr(part, key)):
                lines += ["", f"[parts.{name}.{key}]", *of]
    return ("\n".join(lines) + "\n").encode()


def _lines(of: Pass) -> list[str]:
    lines = []
    for key, kernels in (("kernels", of.kernels), ("products", of.products)):
        if kernels:
            lines += [f"{key} = [", *(f"    {_entry(one)}," for one in kernels), "]"]
    return lines


def _entry(kernel: Kernel) -> str:
    """Return a kernel as a table of one line, without what goes without saying."""
    fields = [f"kernel = {_text(kernel.kernel)}"]
    fields += [f"launches = {kernel.launches}"] if kernel.launches > 1 else []
    fields += [f"dtype = {_text(kernel.dtype)}"]
    fields += ["scattered = true"] if kernel.scattered else []
    amounts = {"reads": kernel.reads, "writes": kernel.writes, "flops": getattr(kernel, "flops", {})}
    fields += [f"{key} = {_inline(of)}" for key, of in amounts.items() if of]
    return f"{{ {', '.join(fields)} }}"


def _inline(of: Formula) -> str:
    return f"{{ {', '.join(f'{_text(product)} = {each:g}' for product, each in of.items())} }}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
