"""Which values of a graph cannot be negative, and which only go into sums: what decides how their grids look best."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from qlightning.vocabulary import Kind, Vocabulary

aten = torch.ops.aten

_NEVER_NEGATIVE = (aten.relu.default, aten.sigmoid.default, aten.hardsigmoid.default)
_KEEPS_SIGNS = (Kind.SAME, Kind.CAT, Kind.POOL, Kind.BINARY, Kind.FAKE_QUANT)


def never_negative(graph: fx.Graph, ops: Vocabulary) -> set[fx.Node]:
    """The values that cannot be negative, whatever comes in: behind a ReLU, a sigmoid, and what keeps signs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:  # operands come first
        kind = ops[node].kind
        if kind is Kind.ACTIVATION:
            target, args, _ = ops.elementwise(node)
            if target in _NEVER_NEGATIVE or (target is aten.hardtanh.default and args[0] >= 0):
                found.add(node)
        elif kind in _KEEPS_SIGNS and found.issuperset(ops[node].inputs):
            found.add(node)
    return found


def feeds_sums_alone(value: fx.Node, ops: Vocabulary) -> bool:
    """Whether all that computes on a value are sums of two tensors."""
    users = list(_computing(value, ops))
    return bool(users) and all(ops[user].kind is Kind.BINARY and ops.binary_name(user) == "add" for user in users)


def _computing(value: fx.Node, ops: Vocabulary) -> Iterator[fx.Node]:
    for user in value.users:
        kind = ops[user].kind
        if kind is Kind.SAME:
            yield from _computing(user, ops)
        elif kind is not Kind.OTHER:
            yield user
