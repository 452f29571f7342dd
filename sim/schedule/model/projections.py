"""q, k and v projected part by part, as attention asks for them, and their gradients led back through that."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from sim.schedule.ir.layout import cut, num_tokens
from sim.schedule.ir.masks import Tokens
from sim.schedule.ir.ops import Copy
from sim.schedule.ir.tensors import Tensor, d
from sim.schedule.ir.views import Split, View
from sim.schedule.model import adapters
from sim.schedule.model.equations import Around, Block, Equation, back, is_product
from sim.schedule.model.weights.params import Params
from sim.schedule.model.write import TokenWriter, Values
from sim.schedule.write.builder import ProgramBuilder
from sim.schedule.write.inputs import ALL, NAMES, Name, Part, inverse


class _Chain(NamedTuple):
    """What makes one of q, k and v of a tensor that a layer saves, and leads its gradient back."""

    made: Tensor
    forward: tuple[Equation, ...]
    backward: tuple[Equation, ...]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights that it takes."""
        return tuple([tensor for one in self.forward for tensor in one.operands if tensor.of_weight])

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """Those that have gradients."""
        made = {tensor for one in self.backward for tensor in one.results}
        return tuple([weight for weight in self.weights if d(weight) in made])

    @property
    def again(self) -> tuple[Equation, ...]:
        """The equations that make what the way back needs of the way there: all up to the last such one."""
        needed = {tensor for one in self.backward for tensor in one.operands}
        last = max((at for at, one in enumerate(self.forward, 1) if not needed.isdisjoint(one.results)), default=0)
        return self.forward[:last]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What it starts from: what its products multiply."""
        return tuple([one.operands[0] for one in self.forward if is_product(one)])

    @property
    def of_adapter(self) -> tuple[Tensor, ...]:
        """What an adapter makes of as many heads, where that is apart."""
        made = {tensor for one in self.forward for tensor in one.results}
        return tuple([tensor for tensor in adapters.TENSORS if tensor in made])


def chains(block: Block) -> dict[Name, _Chain]:
    """Return how a block makes q, k and v."""
    return {name: _chain(block, tensor) for name, tensor in zip(NAMES, (block.q, block.k, block.v), strict=True)}


def _chain(block: Block, made: Tensor) -> _Chain:
    found: list[Equation] = []
    wanted = {made}
    for equation in reversed((*block.forward.before, *block.projections)):
        if not wanted.isdisjoint(equation.results):
            found.insert(0, equation)
            wanted |= {tensor for tensor in equation.operands if not is_product(equation)}
    return _Chain(made, tuple(found), back(*reversed(found)))


def made_again(block: Block) -> tuple[Equation, ...]:
    """Return what a block whose projections are apart computes again, to lead gradients back."""
    return tuple([one for chain in chains(block).values() for one in chain.again])


@lru_cache(maxsize=64)
def with_projections_apart(block: Block) -> Block:
    """Return a block whose q, k and v are made by attention, and so is what leads back through that."""
    of_inputs = chains(block).values()
    apart = {_key(one) for chain in of_inputs for one in (*chain.forward, *chain.backward)}

    def rest(around: Around) -> Around:
        before, after = (tuple([one for one in part if _key(one) not in apart]) for part in around)
        return Around(before, after)

    made = {_key(one) for chain in of_inputs for one in chain.forward}
    results = {tensor for chain in of_inputs for one in chain.forward for tensor in one.results}
    return block._replace(
        saved=tuple([tensor for tensor in block.saved if tensor not in results]),
        forward=rest(block.forward),
        backward=rest(block.backward),
        projections=tuple([one for one in block.forward.before if _key(one) in made]),
    )


def _key(equation: Equation) -> tuple[object, ...]:
    return equation.kind, equation.operands, equation.results


class Projections:
    """Inputs of attention (see ``Inputs``) that a layer projects part by part.

    Columns of a weight lie in the order in which attention takes its heads; where that is not their own they are copied
    into it, and gradients back. Gradients of weights are summed over parts in their own data type, that of what all are
    projected from where it lies (UPipe, arXiv:2602.21196 §3; DeepSpeed's fpdt_layer.py).
    """

    def __init__(
        self, b: ProgramBuilder, layer: int, tokens: Tokens, block: Block, values: Values, q_heads: tuple[int, ...]
    ) -> None:
        """``values`` has the weights and what is projected; it gets the gradients."""
        self._b, self._layer, self._tokens, self._values = b, layer, tokens, values
        self._chains = chains(block)
        model = b.workload.model
        self._heads: Mapping[Name, int] = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
        self._q_heads = q_heads
        self._ordered: Values = {}
        """Weights, and then their gradients, with columns in the order in which attention takes heads."""
        self._begun: set[tuple[Tensor, int | None]] = set()
        """Where rows or columns of sums begin that hold something yet."""
        self._there = {d(source) for chain in self._chains.values() for source in chain.sources} & values.keys()
        """Gradients to which others have added already, of all rows."""

    def part(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> Part:
        """See Inputs."""
        chain = self._chains[name]
        values = self._given(name, rows, heads)
        for tensor in (chain.forward[0].results[0], *chain.of_adapter):
            values[tensor] = self._new(tensor.name, name, rows, heads)
        for equation in chain.forward:
            self._writer(rows, values).write(equation)
        made = values[chain.made]
        return Part(made, tuple(range(made.shape[2])))

    def room(self, name: Name, rows: slice = ALL, heads: slice = ALL) -> View:
        """See Inputs."""
        return self._new(f"d{name}", name, rows, heads)

    def take(self, name: Name, gradient: View, rows: slice = ALL, heads: slice = ALL) -> None:
        """See Inputs."""
        chain, b, whole = self._chains[name], self._b, self._values
        values = {**self._given(name, rows, heads), d(chain.made): gradient}
        for source in map(d, chain.sources):
            if source not in whole:
                whole[source] = b.new(source.later(self._layer), num_tokens(self._tokens))
            values[source] = whole[source][:, rows]
        for weight in map(d, chain.trained):
            if weight not in self._ordered:
                (all_rows,) = weight.rows(b.workload.model)
                self._ordered[weight] = b.new(weight.later(self._layer), all_rows.size)
            values[weight] = self._columns(self._ordered[weight], heads)
        again = (chain.forward[0].results[0], *chain.of_adapter) if chain.again else ()
        of_adapter = tuple(map(d, chain.of_adapter))
        for tensor in (*again, *of_adapter):
            values[tensor] = self._new(tensor.name, name, rows, heads)
        for equation in chain.again:
            self._writer(rows, values).write(equation)
        for equation in chain.backward:
            summed = {
                (tensor, (heads if tensor.of_weight else rows).start)
                for tensor in equation.results
                if tensor not in of_adapter
            }
            adds = not (summed.isdisjoint(self._begun) and self._there.isdisjoint(equation.results))
            self._writer(rows, values).write(equation, adds=adds)
            self._begun |= summed

    def reduce(self, params: Params) -> None:
        """Hand over the gradients of weights, once those of all parts are in them."""
        for name, chain in self._chains.items():
            for weight in chain.trained:
                gradient = d(weight).later(self._layer)
                params.reduce(gradient, self._in_order(name, f"order {gradient.name}", self._ordered[d(weight)]))

    def _given(self, name: Name, rows: slice, heads: slice) -> Values:
        """Return what both ways of a part take: the rows that are projected, and the columns that project them."""
        chain = self._chains[name]
        for weight in chain.weights:
            if weight not in self._ordered:
                self._ordered[weight] = self._in_order(name, f"order {weight.name}", self._values[weight], back=False)
        weights = {weight: self._columns(self._ordered[weight], heads) for weight in chain.weights}
        return {**{source: self._values[source][:, rows] for source in chain.sources}, **weights}

    def _in_order(self, name: Name, label: str, view: View, *, back: bool = True) -> View:
        """Return a weight with its columns in the order of attention, or back in their own."""
        order = self._q_heads
        if name != "q" or order == tuple(range(len(order))):
            return view
        ordered = self._b.like(label.removeprefix("order "), view, "other")
        source, target = (Split(one, len(one.shape) - 1, len(order)) for one in (view, ordered))
        self._b.add(Copy(label=label, source=source, target=target, order=inverse(order) if back else order))
        return ordered

    def _columns(self, weight: View, heads: slice) -> View:
        """Return the columns of some heads, of a bias its elements."""
        dim = self._b.workload.model.head_dim
        some = ALL if heads == ALL else slice(heads.start * dim, heads.stop * dim)
        return weight[:, some] if len(weight.shape) > 1 else weight[some]

    def _new(self, label: str, name: Name, rows: slice, heads: slice) -> View:
        tokens, count = range(num_tokens(self._tokens))[rows], range(self._heads[name])[heads]
        return self._b.tensor(label, len(tokens), len(count), "attention")

    def _writer(self, rows: slice, values: Values) -> TokenWriter:
        start, stop, _ = rows.indices(num_tokens(self._tokens))
        return TokenWriter(self._b, self._layer, cut(self._tokens, start, stop), values)
