"""What each ATen call that only moves values is in ONNX: views, slices, picks, copies."""

from __future__ import annotations

from typing import Any

import torch

from qlightning.backends.onnx_call import Call, Operator

aten = torch.ops.aten


def _full(c: Call) -> str:
    return c.graph.constant(torch.full(tuple(c.out.shape), c["fill_value"], dtype=c.out.dtype))


def _index(c: Call) -> str:
    places = [i for i, index in enumerate(c["indices"]) if index is not None]
    index = c["indices"][places[0]].meta["val"]
    if len(places) > 1 or index.dtype != torch.int64:
        raise c.refuse("has several indices, or a mask")
    return c.add("Gather", c.name("self"), c.name_of(c["indices"][places[0]]), axis=places[0])


def _flip(c: Call) -> str:
    axes = c.axes("dims")
    starts, ends, steps = [-1] * len(axes), [-(2**62)] * len(axes), [-1] * len(axes)
    return c.add("Slice", c.name("self"), *(c.graph.constant(b) for b in (starts, ends, axes, steps)))


def _unbind(c: Call) -> list[str]:
    count, shape = len(c.out), c.graph.constant(list(c.out[0].shape))
    parts = c.graph.add_many("Split", c.name("self"), c.graph.constant([1] * count), count=count, axis=c["dim"])
    return [c.add("Reshape", part, shape) for part in parts]


def _reshape(c: Call) -> str:
    return c.add("Reshape", c.name("self"), c.graph.constant(list(c.out.shape)))


def _transpose(c: Call) -> str:
    order = list(range(c.value().dim()))
    if "dims" in c.arguments:
        order = [d % len(order) for d in c["dims"]]
    else:
        a, b = (c["dim0"], c["dim1"]) if "dim0" in c.arguments else (0, len(order) - 1)
        order[a], order[b] = order[b], order[a]
    return c.add("Transpose", c.name("self"), perm=order)


def _slice(c: Call) -> str:
    start, end = c["start"] or 0, c["end"]
    bounds = [[start], [2**62 if end is None else min(end, 2**62)], [c["dim"]], [c["step"]]]
    return c.add("Slice", c.name("self"), *(c.graph.constant(b) for b in bounds))


def _select(c: Call) -> str:
    index = c["index"] % c.value().shape[c["dim"]]
    return c.add("Gather", c.name("self"), c.graph.constant(index, torch.int64), axis=c["dim"])


def _split(c: Call) -> list[str]:
    dim = c["dim"]
    sizes = [int(part.shape[dim]) for part in c.out]
    return c.graph.add_many("Split", c.name("self"), c.graph.constant(sizes), count=len(sizes), axis=dim)


def _cat(c: Call) -> str:
    parts = [part for part in c["tensors"] if part.meta["val"].shape != (0,)]
    return c.add("Concat", *(c.name_of(part, c.out.dtype) for part in parts), axis=c["dim"])


def _embedding(c: Call) -> str:
    return c.add("Gather", c.name("weight"), c.name("indices"), axis=0)


def _index_select(c: Call) -> str:
    return c.add("Gather", c.name("self"), c.name("index"), axis=c["dim"])


def _same(c: Call) -> str:
    return c.name("self")


def _expand(c: Call) -> str:
    return c.add("Expand", c.name("self"), c.graph.constant(list(c.out.shape)))


def _repeat(c: Call) -> str:
    repeats = c["repeats"]
    x = c.name("self")
    if len(repeats) > c.value().dim():
        missing = [1] * (len(repeats) - c.value().dim())
        x = c.add("Reshape", x, c.graph.constant(missing + list(c.value().shape)))
    return c.add("Tile", x, c.graph.constant(list(repeats)))


def _cast(c: Call) -> str:
    return c.name("self", c.out.dtype)


MOVES: dict[Any, Operator] = {
    aten.full_like.default: _full,
    aten.index.Tensor: _index,
    aten.flip.default: _flip,
    aten.unbind.int: _unbind,
    aten.unbind_copy.int: _unbind,
    **dict.fromkeys((
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
        aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.unsqueeze_copy.default,
    ), _reshape),
    **dict.fromkeys((
        aten.permute.default, aten.transpose.int, aten.t.default,
        aten.permute_copy.default, aten.transpose_copy.int, aten.t_copy.default,
    ), _transpose),
    **dict.fromkeys((
        aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default,
        aten.alias_copy.default, aten.detach_copy.default,
    ), _same),
    aten._to_copy.default: _cast,
    aten.expand.default: _expand,
    aten.expand_copy.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.slice_copy.Tensor: _slice,
    aten.select.int: _select,
    aten.select_copy.int: _select,
    **dict.fromkeys((
        aten.split.Tensor, aten.split_with_sizes.default, aten.split_copy.Tensor, aten.split_with_sizes_copy.default,
    ), _split),
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
}  # fmt: skip
