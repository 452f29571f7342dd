"""Amounts as formulas: at one size each dimension has a prime of its own, whose power in an amount is its exponent.

Two further sizes have to agree, so that a formula is exact or there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction

from calibrate.software.counting.log import Operand
from sim.software.counted import Formula

Sizes = Mapping[str, int]
"""Dimensions, as ``sim.software.counted`` names them."""


TO_DERIVE: Sizes = {
    "batch": 7, "sequence": 23, "tokens": 161, "hidden": 11, "ffn": 29, "heads": 247, "kv_heads": 13, "head_dim": 136,
    "vocab": 2018, "chunk": 31, "parameters": 37 * 32, "multiprocessors": 41,
}  # fmt: skip
TO_CHECK: tuple[Sizes, ...] = (
    {
        "batch": 3, "sequence": 40, "tokens": 120, "hidden": 24, "ffn": 50, "heads": 8, "kv_heads": 2, "head_dim": 64,
        "vocab": 1500, "chunk": 16, "parameters": 1000, "multiprocessors": 12,
    },
    {
        "batch": 2, "sequence": 64, "tokens": 128, "hidden": 16, "ffn": 40, "heads": 6, "kv_heads": 3, "head_dim": 16,
        "vocab": 2900, "chunk": 10, "parameters": 88, "multiprocessors": 7,
    },
)  # fmt: skip
_PRIMES = {
    "batch": 7, "sequence": 23, "hidden": 11, "ffn": 29, "heads": 19, "kv_heads": 13, "head_dim": 17, "vocab": 1009,
    "chunk": 31, "parameters": 37, "multiprocessors": 41,
}  # fmt: skip
"""What divides only one dimension of ``TO_DERIVE``; heads before the key/value heads that they are a multiple of."""


def formula(operands: Iterable[Operand]) -> Formula:
    """Return the bytes of operands of ``TO_DERIVE`` by the product of dimensions that each is proportional to."""
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for one in operands:
        for product, times in terms(one.elements):
            found[product] += times * one.itemsize
    return numbers(found)


def terms(elements: int) -> list[tuple[str, Fraction]]:
    """Return the products of dimensions that add up to a number: one, or several of what is packed into one tensor.

    Those are queries, keys and values, and what there is one more of than sequences.
    """
    heads, kv_heads, each = TO_DERIVE["heads"], TO_DERIVE["kv_heads"], TO_DERIVE["head_dim"]
    packed = heads + 2 * kv_heads
    if elements % (packed * each) == 0 and elements % (3 * heads * each):
        return [_term(elements // packed * heads), _term(elements // packed * 2 * kv_heads)]
    if elements == TO_DERIVE["batch"] + 1:
        return [("batch", Fraction(1)), ("1", Fraction(1))]
    product, times = _term(elements)
    if times > _MOST_TIMES and elements > TO_DERIVE["batch"]:
        return [_term(elements - TO_DERIVE["batch"]), ("batch", Fraction(1))]
    return [(product, times)]


_MOST_TIMES = 16
"""More of the same product are no tensor."""


def _term(elements: int) -> tuple[str, Fraction]:
    """Return the product of dimensions that a number is a multiple of, and how many times it is that."""
    left, factors = Fraction(elements), []
    for name, prime in _PRIMES.items():
        while left.numerator % prime == 0 and left:
            left /= TO_DERIVE[name]
            factors.append(name)
    if {"batch", "sequence"} <= {*factors}:
        factors.remove("batch")
        factors.remove("sequence")
        factors.insert(0, "tokens")
    return "*".join(factors) or "1", left


def numbers(found: Mapping[str, Fraction]) -> Formula:
    """Return amounts as floats, whole ones as ints."""
    return {product: int(each) if each == int(each) else float(each) for product, each in found.items() if each}
