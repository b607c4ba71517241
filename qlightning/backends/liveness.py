"""Which values of a lowered graph nothing reads any more, so that a kernel may write into their memory."""

from __future__ import annotations

import torch
from torch import fx

from qlightning.backends import kernels, onednn_images
from qlightning.backends.qdq import aten

# These give memory of their own and keep no view of what they are given. (A sum that overwrites its residual gives the
# memory of that, which is then read by nothing else.)
_GIVE_FRESH = {
    kernels.call,
    kernels.quantize,
    kernels.quantize_pixels,
    kernels.dequantize,
    kernels.lookup,
    kernels.to_float,
    kernels.max_pool2d,
    onednn_images.binary,
    onednn_images.average,
    kernels.regrid,
    aten.mean.dim,
    torch.cat,
}


def overwrite_residuals(graph: fx.Graph) -> None:
    """Lets bound kernels that add a residual sum into its memory, where it is the graph's own and nobody's later."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.target is kernels.call and len(node.args) == 4:
            function, x, residual, _ = node.args
            if residual is not x and _dies_at(residual, node, order):
                node.args = (function, x, residual, True)


def _dies_at(value: fx.Node, last: fx.Node, order: dict[fx.Node, int]) -> bool:
    if value.target not in _GIVE_FRESH:
        return False
    return all(user is last or (user.target in _GIVE_FRESH and order[user] < order[last]) for user in value.users)
