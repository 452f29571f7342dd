"""A decoder layer as torch.compile has it: what it keeps by its own partitioner, its kernels by the rule of Inductor.

AOTAutograd traces both passes and decides what is kept and what is made again, on any device. Inductor's kernels for a
GPU cannot be made without one; by its rule, element-wise ops and sums along rows between two products are one kernel,
and a sum over tokens is another one, which recomputes what it sums.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from calibrate.software.counting.count import FlashAttention, Ready, Run
from calibrate.software.counting.log import Call, Operand, operand
from calibrate.software.counting.sizes import Sizes
from calibrate.software.libraries.transformers_modules import Modules, layer_of


def layer(modules: Modules, sizes: Sizes) -> Run:
    """Return what a compiled decoder layer runs and keeps."""
    graphs: list[fx.Graph] = []

    def build(modules: Modules, sizes: Sizes) -> Ready:
        module, x, angles = layer_of(modules, sizes)

        def forward(weights: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
            return torch.func.functional_call(module, weights, (x,), {"position_embeddings": (cos, sin)})

        return compiled(forward, (x,), graphs, dict(module.named_parameters()), x, *angles)

    return in_kernels(modules.run(build, sizes), graphs)


def compiled(
    forward: Callable[..., object], inputs: tuple[torch.Tensor, ...], graphs: list[fx.Graph], *given: object
) -> Ready:
    """Return a function of one output, compiled for what it is given; its passes go into ``graphs`` as they come."""
    # The compiler takes longer to load than all else of torch.
    from torch._functorch.aot_autograd import aot_function, make_boxed_func  # noqa: PLC0415
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    def seen(gm: fx.GraphModule, example_inputs: object) -> object:  # noqa: ARG001 - the names are torch's
        graphs.append(gm.graph)
        return make_boxed_func(gm)

    function = aot_function(
        forward,
        fw_compiler=seen,
        bw_compiler=seen,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with FlashAttention(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of inputs that are no leaves, whose gradients torch looks for
        function(*given)
    return Ready(lambda: (function(*given),), inputs)


def in_kernels(run: Run, graphs: list[fx.Graph]) -> Run:
    """Return what ran op by op, of a compiled function, as kernels of its graphs; there is no peak of those."""
    forward, backward = ([*fused(graph)] for graph in graphs)
    return Run(forward, backward, run.kept, [])


def fused(graph: fx.Graph) -> Iterator[Call]:
    """Yield the kernels of a graph."""
    made = _Made(graph)
    for node in made.nodes:
        if _is_product(node):
            yield made.product(node)
        elif _is_complex(node):
            yield made.kernel(node.target.overloadpacket.__name__, [node])  # type: ignore[union-attr]
        elif made.is_barrier(node):
            yield made.kernel("fused sum", [*made.prologue(node), node])
    for group in made.groups():
        yield made.kernel("fused", group)


class _Made:
    """The nodes of a graph that make something: views stand for what they are of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._of: dict[fx.Node, fx.Node] = {}
        self.nodes: list[fx.Node] = []
        self._users: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in graph.nodes:
            if node.op == "call_function" and _is_view(node):
                self._of[node] = self._of[node.all_input_nodes[0]]
                continue
            self._of[node] = node
            for one in self.inputs(node):
                self._users[one].add(node)
            if node.op == "call_function" and node.target is not operator.getitem:
                self.nodes.append(node)

        self._only_summed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if not _is_product(node) and self._users[node] and all(map(self._is_summed, self._users[node])):
                self._only_summed.add(node)

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return what a node takes, once each."""
        return list(dict.fromkeys(self._of[one] for one in node.all_input_nodes))

    def is_barrier(self, node: fx.Node) -> bool:
        """Return whether nothing is one kernel with a node: a product, a sum over tokens, or of complex numbers."""
        return _is_product(node) or _sums_tokens(node) or _is_complex(node)

    def prologue(self, node: fx.Node) -> list[fx.Node]:
        """Return the element-wise nodes that a sum over tokens makes again."""
        found: dict[fx.Node, None] = {}
        left = self.inputs(node)
        while left:
            one = left.pop()
            if one in self.nodes and not self.is_barrier(one) and not _is_reduction(one):
                found[one] = None
                left += self.inputs(one)
        return list(found)

    def groups(self) -> list[list[fx.Node]]:
        """Return the nodes that become one kernel each: connected, with no product or sum over tokens between them."""
        group = {
            node: [node]
            for node in self.nodes
            if not self.is_barrier(node) and (_is_reduction(node) or not self._is_summed(node))
        }
        for node in reversed(group):
            for one in self.inputs(node):
                if one in group and group[one] is not group[node] and not self._leads(group[one], group[node]):
                    joined = [*group[one], *group[node]]
                    group.update(dict.fromkeys(joined, joined))
        return list({id(one): one for one in group.values()}.values())

    def _is_summed(self, node: fx.Node) -> bool:
        """Return whether a node is a sum over tokens, or made for some alone."""
        return _sums_tokens(node) or node in self._only_summed

    def _leads(self, group: list[fx.Node], other: list[fx.Node]) -> bool:
        """Return whether what is in neither lies on a way from one group to another: then they are not one kernel."""
        inside, ends = {*group}, {*other}
        left = [user for node in group for user in self._users[node] if user not in inside and user not in ends]
        seen = set(left)
        while left:
            for user in self._users[left.pop()]:
                if user in ends:
                    return True
                if user not in seen:
                    seen.add(user)
                    left.append(user)
        return False

    def kernel(self, name: str, nodes: list[fx.Node]) -> Call:
        """Return a kernel of several nodes: it reads what is made elsewhere, and writes what is used elsewhere.

        What sums over tokens make again is no use of element-wise nodes. A sum over tokens is the last of its nodes.
        """
        inside = {*nodes}
        read = dict.fromkeys(one for node in nodes for one in self.inputs(node) if one not in inside)
        if self.is_barrier(nodes[-1]):
            written = nodes[-1:]
        else:
            written = [
                node
                for node in nodes
                if any(
                    user not in inside and (_is_reduction(node) or not self._is_summed(user))
                    for user in self._users[node]
                )
            ]
        largest = max(written, key=lambda node: node.meta["val"].numel())
        return Call(name, largest.meta["val"].dtype, _operands(read), _operands(written))

    def product(self, node: fx.Node) -> Call:
        """Return a product or attention."""
        values = [one.meta["val"] for one in node.all_input_nodes]
        out = node.meta["val"]
        arguments = fx.node.map_arg(node.args, lambda one: one.meta["val"])
        flops = flop_registry[node.target.overloadpacket](*arguments, out_val=out)  # type: ignore[union-attr]
        outputs = [out] if isinstance(out, torch.Tensor) else [one for one in out if isinstance(one, torch.Tensor)]
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        outputs = [one for one in outputs if one.numel()]
        return Call(name, outputs[0].dtype, tuple(map(operand, values)), tuple(map(operand, outputs)), flops)


def _operands(nodes: Iterable[fx.Node]) -> tuple[Operand, ...]:
    return tuple(operand(node.meta["val"]) for node in nodes)


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _is_complex(node: fx.Node) -> bool:
    """Return whether a node makes complex numbers, which Inductor has no code for: ATen's kernel runs."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _is_reduction(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in {torch.ops.aten.sum, torch.ops.aten.mean}


def _sums_tokens(node: fx.Node) -> bool:
    if not _is_reduction(node):
        return False
    dims, count = node.args[1], node.all_input_nodes[0].meta["val"].dim()
    return isinstance(dims, list) and all(dim % count != count - 1 for dim in dims)


def _is_view(node: fx.Node) -> bool:
    """Return whether an op makes nothing of its own."""
    schema = getattr(node.target, "_schema", None)
    if getattr(node.target, "overloadpacket", None) is torch.ops.aten._unsafe_view:  # noqa: SLF001 - its public name
        return True
    return schema is not None and any(one.alias_info is not None for one in schema.returns)
