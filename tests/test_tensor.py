"""QuantizedTensor: its codes, its meaning under shape operations, errors, and the way to disk and back."""

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from qlightning import QConfig, QScheme, QuantizedTensor, choose_qparams, quantize, quantize_model, quantize_per_channel
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError

SCHEMES = [
    QScheme(),
    QScheme(signed=False),
    QScheme(bits=4, signed=False),
    QScheme(bits=2),
    QScheme(symmetric=True, narrow_range=True),
    QScheme(bits=5, signed=False, symmetric=True),
]


def per_channel(shape=(3, 4, 5), axis=1, **options):
    generator = torch.Generator().manual_seed(1)
    channels = shape[axis]
    scales = torch.rand(channels, generator=generator) + 0.01
    zero_points = torch.randint(-20, 20, (channels,), generator=generator, dtype=torch.int32)
    x = torch.randn(shape, generator=generator)
    return quantize_per_channel(x, scales, zero_points, axis, **options)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_and_values_are_those_of_numpy(scheme):
    x = torch.linspace(-3, 3, 101)
    scale, zero_point = choose_qparams(x[20:], scheme)
    q = quantize(x, scale, zero_point, scheme)
    step, zero = np.float32(scale.item()), zero_point.item()
    codes = np.rint(x.numpy() * (np.float32(1) / step)) + zero
    codes = np.clip(codes, scheme.quant_min, scheme.quant_max).astype(int)
    assert q.int_repr().tolist() == codes.tolist()
    assert q.int_repr().dtype == scheme.dtype
    np.testing.assert_array_equal(q.dequantize().numpy(), (codes - zero).astype(np.float32) * step)
    assert q.q_scale() == scale.item()
    assert q.q_zero_point() == zero
    assert quantize(torch.zeros(1), scale, zero_point, scheme).dequantize() == 0


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8])
def test_it_agrees_with_torch_s_native_tensors_and_goes_there_and_back(dtype):
    x = torch.randn(3, 4, 5)
    native = torch.quantize_per_tensor(x, 0.03, 7, dtype)
    ours = quantize(x, 0.03, 7, dtype)
    assert torch.equal(ours.int_repr(), native.int_repr())
    assert torch.equal(ours.dequantize(), native.dequantize())
    assert ours.qscheme() == native.qscheme()
    assert QuantizedTensor.from_native(native) == ours
    assert torch.equal(ours.to_native(), QuantizedTensor.from_native(ours.to_native()).to_native())
    scales, zero_points = torch.rand(4) + 0.1, torch.arange(4)
    native = torch.quantize_per_channel(x, scales, zero_points, 1, dtype)
    ours = quantize_per_channel(x, scales, zero_points, 1, dtype)
    assert torch.equal(ours.int_repr(), native.int_repr())
    assert torch.equal(ours.dequantize(), native.dequantize())
    assert torch.equal(ours.q_per_channel_scales(), native.q_per_channel_scales().float())
    assert torch.equal(ours.q_per_channel_zero_points(), native.q_per_channel_zero_points().int())
    assert ours.q_per_channel_axis() == native.q_per_channel_axis()
    assert ours.qscheme() == native.qscheme()
    assert QuantizedTensor.from_native(native) == ours
    assert torch.equal(ours.to_native().int_repr(), native.int_repr())
    assert torch.equal(ours.to_native().dequantize(), native.dequantize())


def test_other_native_tensors_are_refused():
    with pytest.raises(ConfigError, match="qint32"):
        QuantizedTensor.from_native(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint32))
    with pytest.raises(ConfigError, match="float32"):
        QuantizedTensor.from_native(torch.ones(2))


MOVES = {
    "permute": lambda t: t.permute(2, 0, 1),
    "transpose": lambda t: t.transpose(0, 1),
    "movedim": lambda t: t.movedim(1, -1),
    "slice": lambda t: t[1:, 1:3],
    "step": lambda t: t[:, ::2, 1],
    "other dim": lambda t: t[0],
    "none": lambda t: t[None, :, :, None],
    "ellipsis": lambda t: t[..., 2],
    "one channel": lambda t: t[:, 2],
    "one channel kept": lambda t: t[:, 2:3],
    "one element": lambda t: t[1, 2, 3],
    "channels by number": lambda t: t[:, torch.tensor([3, 0, 0])],
    "channels by mask": lambda t: t[:, torch.tensor([True, False, False, True])],
    "index_select": lambda t: t.index_select(1, torch.tensor([2, 1])),
    "select": lambda t: t.select(0, 1),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "flip": lambda t: t.flip(1, 2),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.unsqueeze(2).squeeze(2),
    "expand": lambda t: t.expand(6, 3, 4, 5),
    "reshape": lambda t: t.reshape(3, 4, 5, 1),
    "reshape after permute": lambda t: t.permute(0, 2, 1).reshape(15, 4),
    "view": lambda t: t.view(1, 3, 4, 5),
    "flatten": lambda t: t.permute(1, 0, 2).flatten(1),
    "unflatten": lambda t: t.unflatten(2, (5, 1)),
    "all in one dimension": lambda t: t.flatten(),
    "two in one dimension": lambda t: t.view(12, 5),
    "elements by number": lambda t: t[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "elements by mask": lambda t: t[torch.arange(60).view(3, 4, 5) % 7 == 0],
    "contiguous": lambda t: t.transpose(0, 2).contiguous(),
    "clone": lambda t: t.clone(),
    "to": lambda t: t.to("cpu"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("axis", [None, 1])
def test_a_shape_operation_keeps_the_meaning(move, axis):
    """Moved and then dequantized is dequantized and then moved."""
    q = per_channel() if axis == 1 else quantize(torch.randn(3, 4, 5), 0.02, -3)
    moved = move(q)
    assert isinstance(moved, QuantizedTensor)
    expected = move(q.dequantize())
    assert moved.shape == expected.shape
    assert torch.equal(moved.dequantize(), expected)
    if moved.axis is not None:
        assert len(moved.q_per_channel_scales()) == moved.shape[moved.axis]


@pytest.mark.parametrize(
    "mix", [lambda q: q.reshape(3, 2, 10), lambda q: q.unflatten(1, (2, 2)), lambda q: q.view(2, 30)]
)
def test_what_no_single_dimension_has_the_scales_of_is_an_error(mix):
    with pytest.raises(ConfigError, match="mix the channels along axis 1"):
        mix(per_channel())
    q = quantize(torch.randn(3, 4, 5), 0.02, -3)
    assert torch.equal(mix(q).dequantize(), mix(q.dequantize()))


def test_empty_tensors_pass_through_shape_operations():
    q = quantize_per_channel(torch.zeros(0, 4), torch.ones(4), torch.zeros(4, dtype=torch.int), 1)
    assert q.t().shape == (4, 0)
    assert q[:, :2].shape == (0, 2)
    assert q.dequantize().shape == (0, 4)
    assert "shape=(0, 4)" in repr(q)


def test_channels_last_stays_so():
    q = quantize(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), 0.1, 0)
    assert q.is_contiguous(memory_format=torch.channels_last)
    assert q.clone().is_contiguous(memory_format=torch.channels_last)
    assert q.contiguous().is_contiguous()


def test_equality_and_copies():
    q = per_channel()
    assert q == q.clone() == copy.deepcopy(q) == copy.copy(q)
    assert torch.equal(q, q.clone())
    assert q != q[:, :, :4]
    assert q != q.dequantize()
    assert q != QuantizedTensor(q.codes, q.scale * 2, q.zero_point, q.scheme)
    assert q != QuantizedTensor(q.codes, q.scale, q.zero_point + 1, q.scheme)
    codes = q.codes.clone()
    codes[0, 0, 0] ^= 1
    assert q != QuantizedTensor(codes, q.scale, q.zero_point, q.scheme)
    same_codes = quantize(torch.zeros(2), 0.1, 0, QScheme(symmetric=True))
    assert same_codes != quantize(torch.zeros(2), 0.1, 0, QScheme())
    with pytest.raises(TypeError, match="unhashable"):
        hash(q)
    changed = q.clone()
    changed.codes.zero_()
    assert bool(q.codes.any())


def test_the_text_shows_values_and_grid():
    text = repr(quantize(torch.tensor([0.5, -1.0]), 0.25, 3))
    assert "[ 0.5000, -1.0000]" in text
    for part in ("int8 affine per tensor", "scale=0.25", "zero_point=3", "shape=(2,)"):
        assert part in text
    assert "4 scales from" in repr(per_channel())


BAD = {
    "scale zero": lambda: quantize(torch.ones(2), 0.0, 0),
    "scale negative": lambda: quantize(torch.ones(2), -0.1, 0),
    "scale nan": lambda: quantize(torch.ones(2), float("nan"), 0),
    "scale inf": lambda: quantize(torch.ones(2), float("inf"), 0),
    "scale below float32": lambda: quantize(torch.ones(2), 1e-60, 0),
    "scale complex": lambda: quantize(torch.ones(2), 1j, 0),
    "zero point off the grid": lambda: quantize(torch.ones(2), 0.1, 128),
    "zero point below": lambda: quantize(torch.ones(2), 0.1, -1, torch.quint8),
    "zero point off four bits": lambda: quantize(torch.ones(2), 0.1, 9, QScheme(bits=4)),
    "zero point float": lambda: quantize(torch.ones(2), 0.1, 0.5),
    "zero point of a symmetric grid": lambda: quantize(torch.ones(2), 0.1, 1, QScheme(symmetric=True)),
    "scheme": lambda: quantize(torch.ones(2), 0.1, 0, "int8"),
    "dtype": lambda: quantize(torch.ones(2), 0.1, 0, torch.qint32),
    "integers": lambda: quantize(torch.ones(2, dtype=torch.int32), 0.1, 0),
    "no tensor": lambda: quantize([1.0], 0.1, 0),
    "quantized twice": lambda: quantize(quantize(torch.ones(2), 0.1, 0), 0.1, 0),
    "two scales": lambda: quantize(torch.ones(2), torch.tensor([0.1, 0.1]), 0),
    "axis": lambda: quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.int), 2),
    "number of scales": lambda: quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2).int(), 1),
    "number of zero points": lambda: quantize_per_channel(torch.ones(2, 3), torch.ones(3), torch.zeros(2).int(), 1),
    "2-d scales": lambda: quantize_per_channel(torch.ones(2, 3), torch.ones(3, 1), torch.zeros(3).int(), 1),
    "codes of another dtype": lambda: QuantizedTensor(torch.ones(2), torch.tensor(1.0), torch.tensor(0), QScheme()),
    "codes off the grid": lambda: QuantizedTensor(
        torch.tensor([8], dtype=torch.int8), torch.tensor(1.0), torch.tensor(0), QScheme(bits=4)
    ),
    "the lowest code of a narrow grid": lambda: QuantizedTensor(
        torch.tensor([-128], dtype=torch.int8), torch.tensor(1.0), torch.tensor(0), QScheme(narrow_range=True)
    ),
    "q_scale per channel": lambda: per_channel().q_scale(),
    "q_zero_point per channel": lambda: per_channel().q_zero_point(),
    "scales per tensor": lambda: quantize(torch.ones(2), 0.1, 0).q_per_channel_scales(),
    "axis per tensor": lambda: quantize(torch.ones(2), 0.1, 0).q_per_channel_axis(),
    "to a dtype": lambda: quantize(torch.ones(2), 0.1, 0).to(torch.float32),
    "torch function": lambda: torch.relu(quantize(torch.ones(2), 0.1, 0)),
    "torch sum": lambda: torch.ones(2) + quantize(torch.ones(2), 0.1, 0),
    "choose of integers": lambda: choose_qparams(torch.ones(2, dtype=torch.int8), QScheme()),
    "choose without the axis": lambda: choose_qparams(torch.ones(2), QScheme(axis=1)),
}


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_wrong_arguments_are_typed_errors(wrong):
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert len(str(caught.value)) > 30


def test_values_without_a_code_are_typed_errors():
    with pytest.raises(NonFiniteError):
        quantize(torch.tensor([float("nan")]), 0.1, 0)
    with pytest.raises(NonFiniteError):
        choose_qparams(torch.tensor([float("inf")]), QScheme())
    with pytest.raises(CalibrationError, match="no range"):
        choose_qparams(torch.zeros(0), QScheme())
    assert quantize(torch.tensor([float("inf"), -float("inf")]), 0.1, 0).int_repr().tolist() == [127, -128]


@pytest.mark.parametrize("scheme", [*SCHEMES, QScheme(axis=1), QScheme(bits=3, symmetric=True, axis=-1)], ids=str)
def test_chosen_parameters_cover_the_tensor(scheme):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)) + 0.3
    for reduce_range in (False, True) if scheme.bits > 2 else (False,):
        grid = scheme.reduced() if reduce_range else scheme
        scale, zero_point = choose_qparams(x, scheme, reduce_range=reduce_range)
        error = (quantize(x, scale, zero_point, grid).dequantize() - x).abs()
        # Half a step; at the ends of an affine grid, whose zero point is rounded, one.
        assert (error <= scale * (0.5 if scheme.symmetric and scheme.signed else 1.0) * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_are_computed_in_float32(dtype):
    x = torch.randn(50).to(dtype)
    scale, zero_point = choose_qparams(x, torch.quint8)
    assert scale.dtype == torch.float32
    assert torch.equal(
        quantize(x, scale, zero_point, torch.quint8).codes, quantize(x.float(), scale, zero_point, torch.quint8).codes
    )


TENSORS = [quantize(torch.randn(2, 3), 0.1, 1), per_channel(), quantize(torch.zeros(0), 1.0, 0), per_channel()[:, 1]]


@pytest.mark.parametrize("q", TENSORS, ids=range(len(TENSORS)))
def test_torch_save_and_pickle_give_it_back(q):
    file = io.BytesIO()
    torch.save({"q": q, "other": [q, 1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["q"] == q == loaded["other"][0]
    assert pickle.loads(pickle.dumps(q)) == q


def test_a_fresh_process_loads_it(tmp_path):
    torch.save(per_channel(), tmp_path / "q.pt")
    code = (
        "import sys, torch, qlightning; q = torch.load(sys.argv[1], weights_only=True);"
        "print(type(q).__name__, q.dequantize().double().sum().item())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q.pt")], check=True, capture_output=True, text=True
    )
    name, total = out.stdout.split()
    assert name == "QuantizedTensor"
    assert float(total) == per_channel().dequantize().double().sum().item()


def test_a_pickle_with_other_contents_is_refused():
    q = per_channel()
    rebuild, (codes, scale, zero_point, parts) = q.__reduce__()
    with pytest.raises(ConfigError):
        rebuild(codes, -scale, zero_point, parts)
    with pytest.raises(ConfigError):
        rebuild(codes.float(), scale, zero_point, parts)
    with pytest.raises(ConfigError):
        rebuild(codes, scale, zero_point, (99, *parts[1:]))


class Every(nn.Module):
    """Every kind of layer that has an integer weight; BatchNorm with gammas below, at and above zero."""

    def __init__(self):
        super().__init__()
        self.conv1d, self.conv2d, self.conv3d = nn.Conv1d(4, 4, 3), nn.Conv2d(4, 6, 3, bias=False), nn.Conv3d(1, 2, 2)
        self.bn = nn.BatchNorm2d(6)
        self.up, self.grouped_up = nn.ConvTranspose2d(6, 4, 2), nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.linear = nn.Linear(4, 5)
        self.weight = nn.Parameter(torch.randn(3, 5))
        nn.init.normal_(self.bn.weight)
        nn.init.normal_(self.bn.bias)
        with torch.no_grad():
            self.bn.weight[0] = 0.0

    def forward(self, x):
        y = self.grouped_up(self.up(torch.relu(self.bn(self.conv2d(x)))))
        y = self.conv1d(self.conv1d(y.flatten(2)))
        y = y.mean(2)
        z = self.conv3d(x[:, None]).mean((1, 2, 3, 4))
        return torch.nn.functional.linear(self.linear(y), self.weight) + z[:, None]


@pytest.mark.parametrize(
    "scheme",
    [
        QScheme(symmetric=True, axis=0, narrow_range=True),
        QScheme(symmetric=True, axis=0),
        QScheme(symmetric=True, narrow_range=True),
        QScheme(axis=0),
        QScheme(bits=4, axis=0),
        QScheme(bits=4, signed=False, axis=0),
    ],
    ids=str,
)
def test_every_int8_layer_has_its_weight_as_a_quantized_tensor(scheme):
    torch.manual_seed(0)
    net = Every().eval()
    images = [torch.randn(2, 4, 8, 8) for _ in range(2)]
    int8 = quantize_model(net, images, qconfig=QConfig(weight=scheme), backend="reference")
    names = ["conv1d", "conv2d", "conv3d", "up", "grouped_up", "linear"]
    for name in names:
        layer, floats = int8.get_submodule(name), net.get_submodule(name).weight.detach()
        q = layer.weight()
        assert isinstance(q, QuantizedTensor)
        assert (q.q_per_channel_scales() > 0).all()
        assert q.scheme.bits == scheme.bits
        values = q.dequantize()
        if name == "conv2d":
            factor = net.bn.weight * (net.bn.running_var + net.bn.eps).rsqrt()
            floats = floats * factor.detach().view(-1, 1, 1, 1)
            assert not values[0].any()
        elif name == "grouped_up":
            floats = torch.cat([part.transpose(0, 1) for part in floats.chunk(2)])
        assert values.shape == floats.shape
        shape = [1] * q.ndim
        shape[q.q_per_channel_axis()] = -1
        step = q.q_per_channel_scales().view(shape)
        inside = (values - floats).abs() <= step * 1.001  # half a step, or one at the ends of an affine grid
        assert inside.all() if name != "conv2d" else inside[1:].all()
    found = [m for m in int8.modules() if type(m).__name__ == "QuantizedLayer"]
    assert len(found) == 8  # with that of the second call of conv1d, and the linear that is called as a function
