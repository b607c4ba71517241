"""Activations and the fake-quantizers behind them, joined into one call where a training graph runs."""

from __future__ import annotations

import copy

from torch import fx

from qlightning.calls import function_name, torch_module
from qlightning.graph.patterns import Block
from qlightning.nn.activated import FUNCTIONS, STEPS, activate_and_round, function_and_round
from qlightning.vocabulary import Kind, Vocabulary

_JOINABLE = "joinable"


def mark_joinable(fq: fx.Node, block: Block, ops: Vocabulary) -> None:
    """Notes of a fake-quantizer's node whether it and the activation before it may run as one call.

    The activation has to be that of a layer: what it gets is the graph's own, so that nobody sees whether it works in
    place.

    Args:
        fq: The node of the fake-quantizer.
        block: What it rounds the result of.
        ops: The vocabulary of the graph, as it was before fake-quantizers.
    """
    activation = block.activation
    if activation is None or fq.args != (activation,) or len(activation.users) > 1:
        return
    if ops[block.head].kind is not Kind.LAYER or len(activation.all_input_nodes) != 1:
        return
    if activation.op == "call_module":
        module = ops.module(activation)
        known = module is not None and torch_module(module, STEPS) is not None and not activation.kwargs
    else:
        known = function_name(activation.target) in FUNCTIONS
    if known:
        fq.meta[_JOINABLE] = True


def with_joined_activations(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which these are one call; the graph itself where there are none."""
    if not any(_JOINABLE in node.meta for node in graph.nodes):
        return graph
    joined = copy.deepcopy(graph)
    for node in list(joined.nodes):
        if _JOINABLE in node.meta:
            _join(node, joined)
    joined.lint()
    return joined


def _join(fq: fx.Node, graph: fx.Graph) -> None:
    activation = fq.args[0]
    assert isinstance(activation, fx.Node)
    (x,) = activation.all_input_nodes
    with graph.inserting_before(fq):
        rounding = graph.get_attr(str(fq.target))
        if activation.op == "call_module":
            call = graph.call_function(activate_and_round, (graph.get_attr(str(activation.target)), rounding, x))
        else:
            call = graph.call_function(function_and_round, (function_name(activation.target), rounding, x))
    fq.replace_all_uses_with(call)
    graph.erase_node(fq)
    graph.erase_node(activation)
