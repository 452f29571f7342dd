"""The global batch: what all replicas together train in a step, in sequences or in tokens, shared out among them.

A plain number counts sequences; a number with K or M (1024, 1024^2), or with the word tokens, counts tokens.
"""

from __future__ import annotations

import math
import re

from sim.base.errors import InputError
from sim.base.units import length
from sim.setup.names import at_least_one
from sim.words.workload import MOST_SEQUENCES, parse_length

ANY = "any"
"""What leaves it open: a plan then chooses how many replicas there are, each with ``batch`` sequences."""
USUAL_TOKENS = 2**19
"""What a plan takes for it where nobody says: about 512K tokens, the least that trainings of models have in a step
(arXiv:2005.14165, table 2.1), and one sequence where that is longer."""

_TOKENS = re.compile(r"(?P<tokens>[0-9.]+(?:[KkMm]| *tokens))")
_NEAREST = 3
"""How many divisors are named on each side of what does not divide."""


def sequences_of(global_batch: int | str, seq: int) -> int:
    """Return how many sequences of ``seq`` tokens a global batch has; raises InputError for tokens that are no whole
    number of them.

    >>> sequences_of("4M", 65536), sequences_of("131072 tokens", 65536), sequences_of("64", 65536)
    (64, 2, 64)
    """
    typed = str(global_batch).strip()
    if not _TOKENS.fullmatch(typed):
        if typed == ANY:
            raise InputError(f"`global_batch` {ANY}: only plans choose it; {_EXPECTED}")
        if not typed.isdecimal():
            raise InputError(f"`global_batch` {global_batch}: {_EXPECTED}")
        if len(typed) > len(str(MOST_SEQUENCES)) or int(typed) > MOST_SEQUENCES:
            raise InputError(
                f"`global_batch` {typed[:20]}: at most {MOST_SEQUENCES} sequences; tokens are written as 4M, or with "
                f"the word: 4194304 tokens"
            )
        return at_least_one("global_batch", int(typed))
    tokens = parse_length(typed.removesuffix("tokens"), "`global_batch`")
    count, rest = divmod(tokens, seq)
    if not count:
        raise InputError(f"`global_batch` {typed}: one sequence has {seq} tokens; set `global_batch` 1, or `seq`")
    if rest:
        raise InputError(
            f"`global_batch` {typed} is no whole number of sequences of {seq} tokens: set it to {count} or {count + 1} "
            f"(sequences), or `seq`"
        )
    return count


_EXPECTED = "expected sequences such as 64, or tokens such as 4M"


def counts_tokens(global_batch: int | str) -> bool:
    """Return whether a global batch is in tokens, so that it has fewer sequences where these are longer."""
    return _TOKENS.fullmatch(str(global_batch).strip()) is not None


def of_each(global_batch: int | str, sequences: int, replicas: int, gpus: int, batch: int = 1) -> int:
    """Return how many of the sequences each replica has. Raises InputError where the replicas do not share them
    equally, with the nearest numbers on so many GPUs that they do; and where a ``batch`` above 1 says another number.

    >>> of_each("64", 64, replicas=8, gpus=16)
    8
    """
    said = f"`global_batch` {global_batch}" + (
        "" if str(sequences) == str(global_batch) else f" ({sequences} sequences)"
    )
    each, rest = divmod(sequences, replicas)
    if rest:
        near = [count for count in (each * replicas, (each + 1) * replicas) if count]
        fits = divisors(math.gcd(sequences, gpus))
        nearest = [one for one in fits if one < replicas][-_NEAREST:] + [one for one in fits if one > replicas][
            :_NEAREST
        ]
        raise InputError(
            f"{said} is no multiple of {replicas} replicas: set it to {' or '.join(map(str, near))} (sequences); of "
            f"its divisors {', '.join(map(str, nearest))} would do as `dp_degree` on {gpus} GPUs"
        )
    if batch not in {1, each}:
        raise InputError(
            f"{said} on {replicas} replica{'s' * (replicas > 1)} is {each} sequences each, not the `batch` {batch}: "
            f"leave one of the two out, or set `global_batch` {batch * replicas}"
        )
    return each


def usual_sequences(seq: int, gpus: int, replicas: int = 1) -> int:
    """Return the sequences of a plan's global batch that nobody named: about ``USUAL_TOKENS`` tokens, and at least one.
    Their number divides that of the GPUs, or is a multiple of it, so that replicas can share them. If the degrees fix
    the ``replicas``, it is a multiple of these.

    >>> [usual_sequences(tokens, gpus=64) for tokens in (2**13, 2**16, 2**21)], usual_sequences(2**18, gpus=24)
    ([64, 8, 1], 2)
    >>> usual_sequences(96 * 1024, gpus=24), usual_sequences(2**21, gpus=64, replicas=8)
    (4, 8)
    """
    shares, wanted = gpus // replicas, max(1, USUAL_TOKENS // seq // replicas)
    if wanted >= shares:
        return replicas * (wanted - wanted % shares)
    return replicas * max(one for one in divisors(shares) if one <= wanted)


def divisors(number: int) -> list[int]:
    """Return all divisors, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def told(sequences: int, tokens: int) -> str:
    """Return a number of sequences with how many tokens they are together.

    >>> told(64, 64 * 65536), told(1, 8192)
    ('64 sequences (4M tokens)', '1 sequence (8K tokens)')
    """
    return f"{sequences} sequence{'s' * (sequences > 1)} ({length(tokens)} tokens)"
