"""What modules of real software run, as ``longstep count`` counts it: kernels with their bytes and
launches, what backward keeps, and the peak of what is allocated. One TOML file a piece of software, in ``counted``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Literal

import msgspec

from sim.base.errors import InputError, none_of
from sim.base.files import Kind, marked
from sim.base.presets import Name, load_toml, preset_names
from sim.schedule.derive.kernels import SCATTERED

FOLDER = "sim/software/counted"
MARK = "# What software runs, as longstep count counts it."
"""The first line of every table."""

DIMENSIONS = (
    "tokens", "batch", "sequence", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "chunk", "parameters",
    "multiprocessors",
)  # fmt: skip
"""What amounts are proportional to: tokens are ``batch`` times ``sequence``; ``chunk`` is the tokens of one chunk of a
loss; ``parameters`` those that one step of an optimiser updates; ``multiprocessors`` those of the GPU."""

Bytes = Annotated[float, msgspec.Meta(ge=0)]
Launches = Annotated[int, msgspec.Meta(ge=1)]
Formula = dict[str, Bytes]
"""An amount: what one element takes, by the product of dimensions that says how many there are (``tokens*hidden``);
"1" is one alone."""
DtypeName = Literal["fp64", "fp32", "bf16", "fp16", "int64", "int32", "bool"]


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is described."""


class Kernel(_Data, frozen=True, kw_only=True):
    """An op that launches work and is no product of matrices."""

    kernel: str
    """Its name in ATen, or that of the function."""
    dtype: DtypeName
    """Of what it writes."""
    launches: Launches = 1
    """How often it runs with these operands; the bytes are those of one."""
    reads: Formula = {}
    writes: Formula = {}
    """Bytes, of every operand once: whatever a kernel reads again, and caches hold, is not in it."""
    scattered: bool = False
    """Whether it is pointwise, and operands lie in memory in different orders, one is broadcast, or one is a part of a
    larger tensor."""

    @property
    def one_by_one(self) -> bool:
        """Whether it reads elements of 16 bits one at a time, as ATen's pointwise kernels do that are scattered or cast
        (ATen/native/cuda/CUDALoops.cuh, gpu_kernel_impl).
        """
        narrow = self.dtype in {"bf16", "fp16"}
        if self.kernel in {"_to_copy", "copy_"}:
            read, written = sum(self.reads.values()), sum(self.writes.values())
            return read != written and (narrow or read == 2)
        return self.scattered and narrow

    @property
    def variant(self) -> str:
        """Its name, with the mark of those (``KernelUse.variant``)."""
        return f"{self.kernel} {SCATTERED}" if self.one_by_one else self.kernel

    def __post_init__(self) -> None:
        for formula in (self.reads, self.writes):
            require_formula(formula)


class Product(Kernel, frozen=True, kw_only=True):
    """A product of matrices, or attention: what profiles have points of."""

    flops: Formula
    """Of one launch; of attention those without a mask."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_formula(self.flops)


class Pass(_Data, frozen=True, kw_only=True):
    """What one pass runs, in the order in which each of it comes first."""

    kernels: tuple[Kernel, ...] = ()
    products: tuple[Product, ...] = ()

    @property
    def launches(self) -> int:
        """Launches of kernels, without products."""
        return sum(one.launches for one in self.kernels)

    @property
    def traffic(self) -> Formula:
        """Bytes that kernels read and write, without products."""
        found: Formula = {}
        for one in self.kernels:
            for product, each in (*one.reads.items(), *one.writes.items()):
                found[product] = found.get(product, 0) + one.launches * each
        return found


class Part(_Data, frozen=True, kw_only=True):
    """A module, a function or a step of an optimiser."""

    what: Name
    """Whose code it is, or what is counted of it."""
    forward: Pass = Pass()
    backward: Pass = Pass()
    step: Pass = Pass()
    """Of an optimiser, which has no other pass."""
    kept: Formula = {}
    """Bytes that forward keeps for backward, each storage once: inputs too, but no weights, nor what needs no
    gradient and was there before."""
    peak: Formula = {}
    """Most bytes allocated at once in all passes, beside what was there before, where the dimensions of the part are
    large against those that it does not name; left out where nobody asks."""

    def __post_init__(self) -> None:
        for formula in (self.kept, self.peak):
            require_formula(formula)


class Counted(_Data, frozen=True, kw_only=True):
    """What the parts of a piece of software run."""

    software: Name
    """What it is, in words."""
    versions: dict[str, str]
    """Of each package."""
    command: str
    """What has counted it, or where it was read."""
    created: str
    """The day."""
    parts: dict[str, Part]

    def part(self, name: str) -> Part:
        """Return a part; raises InputError that lists them if there is none of the name."""
        if name not in self.parts:
            raise InputError(f"counted {self.software!r}: {none_of('part', name, self.parts)}")
        return self.parts[name]


COUNTED_FILE = Kind("a table of what software runs", marked(MARK))


def counted_names() -> list[str]:
    """Return the names of the tables that ship."""
    return preset_names(FOLDER)


def load_counted(name: str) -> Counted:
    """Return a table that ships, or one of ``FILE.toml``; raises InputError if there is none, or it is wrong."""
    return _shipped(name) if name in counted_names() else _loaded(name)


def _loaded(name: str) -> Counted:
    return load_toml("software", name, Counted, FOLDER, "`software`")


_shipped = cache(_loaded)


def amount(formula: Formula, sizes: Mapping[str, int]) -> float:
    """Return an amount at given sizes, which have at least the dimensions that the formula names.

    >>> amount({"tokens*hidden": 4, "1": 8}, {"tokens": 3, "hidden": 5})
    68
    """
    return sum(each * math.prod(sizes[name] for name in names(product)) for product, each in formula.items())


def names(product: str) -> Iterator[str]:
    """Yield the dimensions of a product."""
    return iter(() if product == "1" else product.split("*"))


def require_formula(formula: Formula) -> None:
    """Raise ValueError if a product is none of dimensions."""
    for product in formula:
        for name in names(product):
            if name not in DIMENSIONS:
                raise ValueError(f"{product!r}: {none_of('dimension', name, DIMENSIONS)}")
