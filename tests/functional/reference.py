"""Exact arithmetic for the tests: integers and fractions, nothing of the package's own maths."""

from fractions import Fraction

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from qlightning import QScheme, QuantizedTensor

FEW = settings(max_examples=25, derandomize=True, deadline=None)
SCHEMES = [
    QScheme(signed=False),
    QScheme(),
    QScheme(bits=7, signed=False),
    QScheme(bits=4),
    QScheme(symmetric=True, narrow_range=True),
    QScheme(bits=6, signed=False, symmetric=True),
]
SCALES = st.sampled_from([2.0**-7, 0.013, 0.1, 1.0, 3.7])


@st.composite
def zero_points(draw, scheme):
    if scheme.symmetric:
        return 0 if scheme.signed else 2 ** (scheme.bits - 1)
    ends = st.sampled_from([scheme.quant_min, scheme.quant_max])
    return draw(st.one_of(ends, st.integers(scheme.quant_min, scheme.quant_max)))


@st.composite
def tensors(draw, shape, schemes=SCHEMES):
    """A quantized tensor of a shape: codes of all kinds, the ends among them, any zero point."""
    scheme = draw(st.sampled_from(schemes))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = generator.integers(scheme.quant_min, scheme.quant_max + 1, shape)
    if draw(st.booleans()):  # worst-case sums: nothing but the ends
        codes = np.where(generator.random(shape) < 0.9, scheme.quant_max, scheme.quant_min)
    return QuantizedTensor(
        torch.from_numpy(codes).to(scheme.dtype),
        torch.tensor(draw(SCALES)),
        torch.tensor(draw(zero_points(scheme))),
        scheme,
    )


@st.composite
def grids(draw, schemes=SCHEMES):
    """The grid of a result; many of the scales make it saturate, or round it to nothing."""
    scheme = draw(st.sampled_from(schemes))
    scale = draw(st.sampled_from([0.001, 0.05, 0.77, 12.5, 400.0]))
    return {"scheme": scheme, "scale": scale, "zero_point": draw(zero_points(scheme))}


def centred(q):
    """codes - zero_point, int64."""
    return q.int_repr().numpy().astype(np.int64) - q.q_zero_point()


def fraction(scale):
    """A float32 scale as the number that it is."""
    return Fraction(float(np.float32(scale)))


def steps_from(values, grid):
    """How far each exact value lies above the zero point, in steps of the grid: an array of fractions."""
    return np.vectorize(lambda value: Fraction(value) / fraction(grid["scale"]), otypes=[object])(values)


def distance(result, values, grid):
    """The largest distance, in codes, of a result from exact values that are rounded half to even and clamped."""
    scheme, zero_point = grid["scheme"], grid["zero_point"]
    rounded = np.vectorize(lambda step: round(step) + zero_point, otypes=[object])(steps_from(values, grid))
    expected = np.clip(rounded.astype(object), scheme.quant_min, scheme.quant_max).astype(np.int64)
    assert result.scheme == scheme
    assert result.shape == expected.shape
    if not expected.size:
        return 0
    return int(np.abs(result.int_repr().numpy().astype(np.int64) - expected).max())


def conv(x, w, stride, padding, dilation, groups):
    """A convolution of integers (batch, in, *spatial) and (out, in / groups, *kernel), all arguments a number."""
    dims = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *[(padding, padding)] * dims])
    sizes = [(x.shape[2 + d] - dilation * (w.shape[2 + d] - 1) - 1) // stride + 1 for d in range(dims)]
    out = np.zeros((x.shape[0], w.shape[0], *sizes), dtype=np.int64)
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    for group in range(groups):
        outs = slice(group * per_out, (group + 1) * per_out)
        for position in np.ndindex(*w.shape[2:]):
            window = tuple(
                slice(p * dilation, p * dilation + (size - 1) * stride + 1, stride)
                for p, size in zip(position, sizes, strict=True)
            )
            part = x[(slice(None), slice(group * per_in, (group + 1) * per_in), *window)]
            kernel = w[(outs, slice(None), *position)]
            out[:, outs] += np.einsum("bi...,oi->bo...", part, kernel)
    return out
