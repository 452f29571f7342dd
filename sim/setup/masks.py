"""What attention keeps of each document, by the name that a user types."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.base.errors import InputError, unknown
from sim.schedule.ir.masks import Band, band_of
from sim.words.patterns import AttentionSink, CausalBlockwise, Pattern, SharedQuestion
from sim.words.workload import MaskName, parse_length

_WHERE = "`mask`"


class Kept(NamedTuple):
    """What each document keeps of itself."""

    mask: MaskName = "causal"
    window: int | None = None
    pattern: Pattern | None = None
    """Of what a causal mask keeps; without a window."""

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.pattern or self.mask + (f" with a window of {self.window}" if self.window else ""))

    @property
    def keeps(self) -> Band | Pattern:
        """As batches and masks have it."""
        return self.pattern or band_of(self.mask, self.window)


class _Form(NamedTuple):
    numbers: tuple[str, ...]
    """That stand behind the name, with colons before each; the last ones, in brackets, may be left out."""
    of: Callable[..., Kept]

    def spelled(self, name: str) -> str:
        """Return the form as a user types it.

        >>> _Form(("SIZE", "[SINK]"), Kept).spelled("blockwise")
        'blockwise:SIZE[:SINK]'
        """
        return name + "".join(f"[:{one[1:-1]}]" if one[0] == "[" else f":{one}" for one in self.numbers)


_FORMS = {
    "causal": _Form((), Kept),
    "full": _Form((), lambda: Kept(mask="full")),
    "window": _Form(("TOKENS",), lambda window: Kept(window=window)),
    "lambda": _Form(("SINK", "WINDOW"), lambda sink, window: Kept(pattern=AttentionSink(sink=sink, window=window))),
    "blockwise": _Form(
        ("SIZE", "LOCAL", "[SINK]"),
        lambda size, local, sink=1: Kept(pattern=CausalBlockwise(size=size, local=local, sink=sink)),
    ),
    "shared-question": _Form(
        ("ANSWERS", "SHARE"), lambda answers, share: Kept(pattern=SharedQuestion(answers=answers, share=share))
    ),
}
MASKS = tuple(form.spelled(name) for name, form in _FORMS.items())
"""All forms of a mask."""


def kept_of(given: str, window: int | None = None) -> Kept:
    """Return what a text says, with a window that is given beside it; raises InputError that names the forms for a text
    that says nothing, and where it is of a window of its own, or of a pattern.

    >>> kept_of("lambda:64:4K").pattern
    AttentionSink(sink=64, window=4096)
    """
    name, *numbers = str(given).split(":")
    form = _FORMS.get(name)
    if form is None:
        raise unknown("mask", given, MASKS, _WHERE)
    needed = [one for one in form.numbers if one[0] != "["]
    if not len(needed) <= len(numbers) <= len(form.numbers):
        raise InputError(f"{_WHERE} {given}: expected {form.spelled(name)}; allowed are {', '.join(MASKS)}")
    found = form.of(*(_number(what, text, given) for what, text in zip(form.numbers, numbers, strict=False)))
    if window is None:
        return found
    if form.numbers:
        raise InputError(f"`window` {window} beside {_WHERE} {given}: leave out one of them")
    return found._replace(window=window)


def _number(what: str, text: str, given: str) -> float:
    """Return a share as it is, all else as lengths are typed."""
    if what != "SHARE":
        return parse_length(text, f"{_WHERE} {given}: {what.strip('[]')}")
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_WHERE} {given}: {what} {text}: expected a number such as 0.2") from None
