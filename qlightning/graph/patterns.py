"""Where the grids go: which calls form a block with one rounding at its end, and which values lie on a grid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from torch import fx

from qlightning.calls import function_name
from qlightning.vocabulary import Kind, Vocabulary

_COMPUTES_INT8 = frozenset(
    {Kind.LAYER, Kind.ACTIVATION, Kind.BINARY, Kind.MATMUL, Kind.CAT, Kind.POOL, Kind.FAKE_QUANT}
)


@dataclass
class Block:
    """Calls that compute in full precision and round once, at the end.

    Attributes:
        head: The layer, or the add, mul, matmul, activation, pooling or cat that stands alone.
        bn: The BatchNorm that folds into the layer.
        add: The sum that takes the layer's result in, unrounded.
        residual: The other operand of that sum.
        activation: The activation at the end.
        output: The last of them.
    """

    head: fx.Node
    output: fx.Node
    bn: fx.Node | None = None
    add: fx.Node | None = None
    residual: fx.Node | None = None
    activation: fx.Node | None = None


@dataclass
class Plan:
    """Where the grids of one graph are.

    Attributes:
        blocks: From the last node of every block to the block.
        grids: The nodes whose values lie on a grid of their own, in the order of the graph.
        consumers: For every one of these, a node that computes on it.
        inner: Those of them that are layers, rounded before what follows in their block.
    """

    blocks: dict[fx.Node, Block] = field(default_factory=dict)
    grids: list[fx.Node] = field(default_factory=list)
    consumers: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inner: set[fx.Node] = field(default_factory=set)


def plan(
    graph: fx.Graph,
    ops: Vocabulary,
    is_int8_layer: Callable[[fx.Node], bool],
    floats: Collection[fx.Node],
    rounds_layer: Callable[[bool, str], bool],
) -> Plan:
    """Finds the blocks of a graph and the values that need a grid.

    A value needs one where an int8 layer or a matmul of a FloatFunctional computes on it, or a call that can run on
    codes and whose own result needs one. Moves (reshape, max pooling, ...) keep the grid of what they move, so the grid
    stands at its source.

    Args:
        graph: A traced graph, without fake-quantizers.
        ops: Its vocabulary.
        is_int8_layer: Whether a layer becomes int8.
        floats: Nodes that stay float, as they belong to excluded modules.
        rounds_layer: Whether a layer has a grid of its own, by whether a sum takes it in and the activation behind.
    """
    floats = {*floats, *(n for n in graph.nodes if ops[n].kind is Kind.LAYER and not is_int8_layer(n))}
    found = Plan(blocks=_blocks(graph, ops, floats))
    interior = {
        n for b in found.blocks.values() for n in (b.head, b.bn, b.add, b.activation) if n not in (None, b.output)
    }
    wanted: dict[fx.Node, fx.Node] = {}

    def want(value: fx.Node, consumer: fx.Node) -> None:
        wanted.setdefault(value, consumer)

    for node in reversed(graph.nodes):
        if node in interior or node in floats:
            continue
        block = found.blocks.get(node)
        kind = ops[node].kind
        if block is not None and ops[block.head].kind is Kind.LAYER:
            want(ops[block.head].inputs[0], block.head)
            if block.residual is not None and node in wanted:
                want(block.residual, block.head)
            activation = "" if block.activation is None else function_name(ops.elementwise(block.activation)[0])
            if node in wanted and rounds_layer(block.add is not None, activation):
                found.inner.add(block.bn or block.head)
                want(block.bn or block.head, block.head)
        elif block is not None and ops[block.head].kind is Kind.MATMUL:
            for value in ops[block.head].inputs:
                want(value, block.head)
        elif node in wanted and kind is Kind.SAME:
            want(ops[node].inputs[0], wanted[node])
        elif node in wanted and block is not None and ops[block.head].kind is not Kind.CAT:
            inputs = ops[block.head].inputs
            if all(_can_have_grid(value, ops, floats) for value in inputs):
                for value in inputs:
                    want(value, block.head)
    for node in graph.nodes:
        if node in wanted and (ops[node].kind is not Kind.SAME or node in floats):
            found.grids.append(node)
            found.consumers[node] = wanted[node]
    return found


def _can_have_grid(value: fx.Node, ops: Vocabulary, floats: Collection[fx.Node]) -> bool:
    """Whether a value comes from an int8 computation or from outside, so that its grid costs nothing more."""
    if value in floats:
        return False
    kind = ops[value].kind
    if kind is Kind.SAME:
        return _can_have_grid(ops[value].inputs[0], ops, floats)
    if kind is Kind.BATCH_NORM:  # folded, or it stands alone in float
        before = ops[value].inputs[0]
        return ops[before].kind is Kind.LAYER and before not in floats and only_user(before, ops) is value
    return kind in _COMPUTES_INT8 or value.op == "placeholder"


def _blocks(graph: fx.Graph, ops: Vocabulary, floats: Collection[fx.Node]) -> dict[fx.Node, Block]:
    """The blocks by their last node. Layers first, so that a sum finds every layer that it may take in."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    blocks: dict[fx.Node, Block] = {}
    for node in graph.nodes:
        if ops[node].kind is not Kind.LAYER or node in floats:
            continue
        follower = only_user(node, ops)
        bn = follower if follower is not None and follower not in floats and can_fold(follower, ops) else None
        blocks[bn or node] = Block(head=node, output=bn or node, bn=bn)
    for node in graph.nodes:
        kind = ops[node].kind
        if node in floats or kind not in (Kind.BINARY, Kind.MATMUL, Kind.ACTIVATION, Kind.POOL, Kind.CAT):
            continue
        if kind is Kind.ACTIVATION and (block := _open_for_activation(node, blocks, ops)) is not None:
            block.activation = node
        elif kind is Kind.BINARY and (block := _open_for_sum(node, blocks, ops, order)) is not None:
            left, right = ops[node].inputs
            block.residual = right if block.output is left else left
            block.add = node
        else:
            blocks[node] = Block(head=node, output=node)
            continue
        del blocks[block.output]
        block.output = node
        blocks[node] = block
    return blocks


def _open_for_activation(node: fx.Node, blocks: dict[fx.Node, Block], ops: Vocabulary) -> Block | None:
    """The block whose end an activation becomes: one that computes in full precision, read by nothing else."""
    before = ops[node].inputs[0]
    block = blocks.get(before)
    if block is None or block.activation is not None or only_user(before, ops) is not node:
        return None
    return None if ops[block.head].kind in (Kind.POOL, Kind.CAT) else block


def _open_for_sum(
    node: fx.Node, blocks: dict[fx.Node, Block], ops: Vocabulary, order: dict[fx.Node, int]
) -> Block | None:
    """The layer that takes a sum in: the later of its operands that is a layer without activation, read by it alone."""
    left, right = ops[node].inputs
    if ops.binary_name(node) != "add" or left is right:
        return None
    found = [blocks[value] for value in (left, right) if value in blocks and only_user(value, ops) is node]
    layers = [b for b in found if ops[b.head].kind is Kind.LAYER and b.activation is None and b.add is None]
    return max(layers, key=lambda block: order[block.output], default=None)


def only_user(node: fx.Node, ops: Vocabulary) -> fx.Node | None:
    """The one node that computes on a value; None where there are several. Asking for its size does not count."""
    users = list(_users(node, ops))
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _users(node: fx.Node, ops: Vocabulary) -> Iterator[fx.Node]:
    for user in node.users:
        if ops.is_identity(user):
            yield from _users(user, ops)
        elif ops[user].kind is not Kind.OTHER:
            yield user


def can_fold(node: fx.Node, ops: Vocabulary) -> bool:
    """Whether a node is a BatchNorm with running statistics: in eval mode a fixed factor per channel."""
    module = ops.module(node)
    return ops[node].kind is Kind.BATCH_NORM and module is not None and module.running_var is not None


def source_of(node: fx.Node, ops: Vocabulary) -> fx.Node:
    """The value that a chain of moves has moved."""
    while ops[node].kind is Kind.SAME:
        node = ops[node].inputs[0]
    return node
