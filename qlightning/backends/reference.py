"""The backend ``reference``: the QDQ graph as it is. It says what the others have to compute, on any device."""

from __future__ import annotations

from torch import fx, nn

from qlightning.backends.base import Backend
from qlightning.backends.qdq import FLOAT_LAYER


def build() -> Backend:
    """Builds the backend."""
    return Backend(name="reference", lower=lower)


def lower(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Returns the graph itself."""
    for node in graph.nodes:
        if "layer" in node.meta:
            root.get_submodule(node.meta["layer"]).kernel = FLOAT_LAYER  # type: ignore[assignment]
    return graph
