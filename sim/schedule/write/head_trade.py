"""All-to-alls that trade tokens for heads and back: (B, S/U, H, D) of all heads <-> (B, S, h, D) of a member's heads.

Parts of a message must follow each other in memory, so a trade may copy before it (pack) and after it (unpack). Where a
head goes to several members, what they send back for it is summed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from sim.schedule.ir.ops import AllToAll, Copy, Fold, Hold, HostSync
from sim.schedule.ir.program import Communicator
from sim.schedule.ir.views import HEADS, TOKENS, Category, Split, View
from sim.schedule.write.builder import ProgramBuilder
from sim.words.options import LayerOptions

NO_HEADS: Mapping[str, Sequence[int]] = MappingProxyType({})
"""Every member gets heads by its place."""


@dataclass(frozen=True, kw_only=True)
class TradeOptions(LayerOptions):
    """Options of trades."""

    all_to_alls: Literal["blocking", "host-sync", "async"] = "blocking"
    """Who waits for an all-to-all: every kernel behind it, as for any collective of torch's without async_op, which
    yunchang (0.6.4 comm/all_to_all.py) and DeepSpeed (sequence/layer.py) call; the host, too, as with yunchang's
    use_sync; or only what needs what it brings."""
    packed: bool = False
    """Whether q, k and v go in one all-to-all instead of three; of UPipe k and v, which its stages share."""
    layout_copies: Literal["needed", "always"] = "needed"
    """Whether all-to-alls copy only where parts have gaps, or before and after each, as published code does."""


class _Part(NamedTuple):
    """One tensor's part in an all-to-all."""

    name: str
    sends: Split
    recvs: Split
    order: tuple[int, ...] = ()
    """Which part of ``sends`` goes to each member, where they are not one each."""
    fold: bool = False
    """Whether what comes back is summed up, as several members had the same heads."""


class HeadTrade:
    """The trades of one rank with its Ulysses group."""

    def __init__(self, builder: ProgramBuilder, over: Communicator, options: TradeOptions) -> None:
        self._b = builder
        self._over = over
        self._options = options
        self.size = len(over.group_of(builder.rank))
        self.position = over.position(builder.rank)

    def to_heads(
        self,
        local: dict[str, View],
        category: Category,
        heads: Mapping[str, Sequence[int]] = NO_HEADS,
        into: View | None = None,
    ) -> list[View]:
        """Return (B, S, h, D) of all tokens of the group from (B, S/U, H, D) of this rank's, by name; of a single one
        it may say where that shall be.

        Member i gets the i-th H/U heads of a tensor, or the one head ``heads[name][i]``.
        """
        parts = []
        for name, view in local.items():
            _, tokens, total, _ = view.shape
            chosen = tuple(heads.get(name, ()))
            each = 1 if chosen else total // self.size
            whole = into or self._b.tensor(f"{name} of heads", tokens * self.size, each, category)
            sends = Split(view, HEADS, total if chosen else self.size)
            parts.append(_Part(name, sends, Split(whole, TOKENS, self.size), chosen))
        return self._trade(parts)

    def to_tokens(self, whole: dict[str, View], into: dict[str, View]) -> None:
        """Write (B, S/U, H, D) of this rank's tokens from (B, S, h, D) of the group's, by name.

        Member i has the i-th h heads of U * h; where ``into`` has fewer, each is the sum of those of several members.
        """
        parts = []
        for name, view in whole.items():
            heads, total = view.shape[HEADS], into[name].shape[HEADS]
            fold = total < heads * self.size
            recvs = Split(into[name], HEADS, total if fold else self.size)
            parts.append(_Part(name, Split(view, TOKENS, self.size), recvs, fold=fold))
        self._trade(parts)

    def _trade(self, parts: list[_Part]) -> list[View]:
        """Append the all-to-alls, one for all parts if packed, else one for each; return what they receive.

        Each is unpacked behind it where it blocks; else all behind the last one, so that no copy holds up the next.
        """
        groups = [parts] if self._options.packed else [[part] for part in parts]
        traded = ((group, self._all_to_all(group)) for group in groups)
        for group, arrived in list(traded) if self._options.all_to_alls == "async" else traded:
            if arrived != group[0].recvs:
                for part, place in zip(group, self._places(arrived, group), strict=True):
                    unpack = Fold if part.fold else Copy
                    self._b.add(unpack(label=f"unpack {part.name}", source=place, target=part.recvs))
        return [part.recvs.view for part in parts]

    def _all_to_all(self, parts: list[_Part]) -> Split:
        """Append one all-to-all, packed first where parts do not follow each other in memory; return what it receives:
        where it belongs, or a buffer that has to be unpacked.
        """
        b, first = self._b, parts[0]
        name = " ".join(part.name for part in parts)
        alone = len(parts) == 1 and self._options.layout_copies == "needed"
        if alone and not first.order and b.parts_are_contiguous(first.sends):
            sends = first.sends
        else:
            sends = self._staging(f"{name} packed", parts)
            for part, place in zip(parts, self._places(sends, parts), strict=True):
                b.add(Copy(label=f"pack {part.name}", source=part.sends, target=place, order=tuple(part.order)))
        direct = alone and not first.fold and b.parts_are_contiguous(first.recvs)
        recvs = first.recvs if direct else self._staging(f"{name} arrived", parts)
        b.add(AllToAll(label=f"all-to-all {name}", communicator=self._over.name, sends=sends, recvs=recvs))
        if self._options.all_to_alls == "blocking":
            b.add(Hold(label=f"wait for {name}", held=(recvs.view,)))
        elif self._options.all_to_alls == "host-sync":
            b.add(HostSync(label=f"wait for {name}", streams=(self._over.name,)))
        return recvs

    def _staging(self, name: str, parts: list[_Part]) -> Split:
        """Return a new buffer in which what goes to, or comes from, each member lies in one piece."""
        batch, tokens, _, dim = parts[0].sends.part_shape
        heads = sum(part.sends.part_shape[HEADS] for part in parts)
        dtype = self._b.dtype(parts[0].sends.view)
        return Split(
            self._b.buffer(name, "bshd", (self.size * batch, tokens, heads, dim), dtype, "repartition"), 0, self.size
        )

    def _places(self, staging: Split, parts: list[_Part]) -> list[Split]:
        """Return where each part lies in a staging buffer."""
        places, at = [], 0
        for part in parts:
            heads = part.sends.part_shape[HEADS]
            places.append(Split(staging.view[:, :, at : at + heads], 0, self.size))
            at += heads
        return places
