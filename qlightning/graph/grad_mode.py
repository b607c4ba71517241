"""Regions of a forward that run under no_grad: the graph detaches what leaves them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_map

from qlightning.calls import function_name
from qlightning.vocabulary import Kind, Vocabulary

_TENSORS = (Kind.LAYER, Kind.BATCH_NORM, Kind.ACTIVATION, Kind.BINARY, Kind.MATMUL, Kind.CAT, Kind.POOL, Kind.SAME)


def without_gradient(value: Any) -> Any:
    """A value with all tensors in it detached."""
    return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, value)


def detach_regions(graph: fx.Graph, ops: Vocabulary) -> None:
    """Detaches the values that calls marked ``no_grad`` hand to calls that are not: no gradient comes back to them."""
    for node in list(graph.nodes):
        picks = function_name(node.target) in ("getitem", "getattr") and isinstance(node.args[0], fx.Node)
        if picks and node.args[0].meta.get("no_grad"):
            node.meta["no_grad"] = True
        if not node.meta.get("no_grad") or ops[node].kind is Kind.OTHER:
            continue
        picked = [user for user in node.users if function_name(user.target) in ("getitem", "getattr")]
        outside = [u for u in node.users if not u.meta.get("no_grad") and u not in picked]
        if not outside:
            continue
        with graph.inserting_after(node):
            if ops[node].kind in _TENSORS and not ops[node].sequence:
                detached = graph.call_method("detach", (node,))
            else:
                detached = graph.call_function(without_gradient, (node,))
        detached.meta["owner"] = node.meta.get("owner", "")
        for user in outside:
            user.replace_input_with(node, detached)
