"""Every call that int8 models know: the fake-quantized net, its QDQ form and the kernels say the same."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

from qlightning import QConfig, calibrate, convert, prepare, report
from qlightning.affine import sqnr
from qlightning.backends import available, resolve_backend
from qlightning.backends.qdq import NO_KERNEL
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.nn.bias import BiasRounding
from qlightning.observers import MinMaxObserver
from tests.graph.nets import CASES, Between, Case

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
MODES = ("qat", "ptq")
# Every case in one mode each time the tests run, in the other with the slow ones.
EVERY = [
    pytest.param(case, mode, id=f"{case}-{mode}", marks=[pytest.mark.slow] if (index + turn) % 2 else [])
    for index, case in enumerate(CASES)
    for turn, mode in enumerate(MODES)
]
FEW = [case for case in CASES if case.name in ("conv-bn-relu", "relu(x + conv)", "Conv2d stride", "cat of x and pool")]
WEIGHTED = [
    case
    for case in CASES
    if isinstance(op := case.build().op, nn.Module)
    and isinstance(op[0] if isinstance(op, nn.Sequential) else op, (nn.Linear, nn.modules.conv._ConvNd))
]


def observed(net: nn.Module, case: Case, mode: str, backend: str = BACKENDS[0]) -> nn.Module:
    """The net, prepared and with ranges; in eval mode."""
    qconfig = QConfig(activation_observer=MinMaxObserver) if mode == "ptq" else None
    prepare(net, qconfig, backend=backend, mode=mode)
    if mode == "ptq":
        return calibrate(net.eval(), [case.input()])
    net.train()
    net(case.input(), expose=True)
    return net.eval()


def step(grid: Tensor) -> float:
    """The smallest distance between values of a tensor that lies on a grid."""
    values = grid.unique().double()
    return float((values[1:] - values[:-1]).min()) if len(values) > 1 else 1.0


def assert_agree(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> None:
    """What the op makes differs by one code at most, where a rounding was a tie; what comes of it by 40 dB or more."""
    assert [value.shape for value in expected] == [value.shape for value in found]
    assert all(value.dtype == torch.float32 for value in found)
    (y, z), (other_y, other_z) = expected, found
    if y.numel():
        assert (y - other_y).abs().max() <= 1.01 * step(y)
        assert sqnr(z, other_z) >= 40


@torch.no_grad()
@pytest.mark.parametrize("case, mode", EVERY)
def test_int8_is_the_fake_quantized_net(case: Case, mode: str) -> None:
    prepared = observed(case.build(), case, mode)
    int8 = {name: convert(prepared, backend=name) for name in BACKENDS}
    for batch, grow in ((2, 0), (1, 0), (3, 2)):
        x = case.input(batch, grow)
        try:
            expected = prepared(x, expose=True)
        except RuntimeError:
            assert grow, "a net with a linear layer behind its images takes one size of image"
            continue
        reference = int8["reference"](x, expose=True)
        assert_agree(expected, reference)
        for name in BACKENDS:
            found = reference if name == "reference" else int8[name](x, expose=True)
            assert_agree(expected, found)
            assert_agree(reference, found)
            if not grow:
                assert_agree(expected, (found[0], int8[name](x)))
    for name, model in int8.items():
        layers = report(model).layers
        modules = {row.name for row in report(prepared).layers if row.kind != "function"}
        assert {row.name for row in layers} >= modules
        assert len(layers) >= len(report(prepared).layers)
        assert all((row.int8 and row.kernel) or (name == "x86" and row.reason == NO_KERNEL) for row in layers)
        if name == "onednn":
            assert all(row.kernel.startswith("onednn q") for row in layers)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES[::11], ids=str)
def test_an_empty_batch_passes_where_the_float_net_takes_one(case: Case) -> None:
    prepared = observed(case.build(), case, "ptq")
    x = case.input(0)
    try:
        expected = prepared(x, expose=True)
    except (RuntimeError, IndexError):
        pytest.skip("the float net takes no empty batch")
    for name in BACKENDS:
        assert_agree(expected, convert(prepared, backend=name)(x, expose=True))


def folded(layer: nn.Module, bn: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Weight (out, in / groups, ...) and bias in float64, BatchNorm folded in: plain loops over the channels."""
    weight = layer.weight.detach().double()
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        blocks = [block.transpose(0, 1) for block in weight.chunk(layer.groups)]
        weight = torch.cat(blocks)
    channels = len(weight)
    bias = torch.zeros(channels).double() if layer.bias is None else layer.bias.detach().double()
    if bn is None:
        return weight, bias
    factor = 1 / (bn.running_var.double() + bn.eps).sqrt()
    factor = factor if bn.weight is None else factor * bn.weight.detach().double()
    shift = 0 if bn.bias is None else bn.bias.detach().double()
    weight = torch.stack([weight[channel] * factor[channel] for channel in range(channels)])
    return weight, (bias - bn.running_mean.double()) * factor + shift


@pytest.mark.parametrize("case", WEIGHTED[::2], ids=str)
def test_int8_weights_are_the_folded_weights_within_half_a_step(case: Case) -> None:
    net = case.build()
    float_op = copy.deepcopy(net.op)
    prepared = observed(net, case, "ptq")
    int8 = convert(prepared)
    layers = list(float_op) if isinstance(float_op, nn.Sequential) else [float_op]
    at = "op.0" if isinstance(float_op, nn.Sequential) else "op"
    layer = layers[0]
    follows = layers[1] if len(layers) > 1 and isinstance(layers[1], nn.modules.batchnorm._BatchNorm) else None
    bn = (
        follows if follows is not None and follows.running_var is not None and case.name != "linear-bn on 3-d" else None
    )
    expected_weight, expected_bias = folded(layer, bn)
    quantized = int8.get_submodule(at)
    weight = quantized.weight()
    assert weight.int_repr().dtype == torch.int8
    values = weight.dequantize()
    if getattr(layer, "transposed", False) and layer.groups == 1:
        assert values.shape == layer.weight.shape
        values = values.transpose(0, 1)
    scale = weight.scale.view(-1, *[1] * (values.dim() - 1))
    assert ((values - expected_weight).abs() <= scale * 0.5001).all()
    scheme = QConfig().weight if resolve_backend(BACKENDS[0]).reduced != "weight" else QConfig().weight.reduced()
    assert weight.int_repr().abs().max() == scheme.quant_max
    if quantized.bias is None:
        assert not expected_bias.any()
    else:
        own = (m for m in prepared.modules() if isinstance(m, BiasRounding) and m.of[0] is prepared.get_submodule(at))
        step = (weight.scale * next(own).of[2].scale).double()  # of the integer sums
        assert ((quantized.bias - expected_bias).abs() <= step * 0.5001 + expected_bias.abs() * 1e-5).all()
        codes = quantized.bias.double() / step
        torch.testing.assert_close(codes, codes.round(), rtol=1e-6, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("case", FEW, ids=str)
def test_one_value_has_one_grid_however_often_it_is_read(case: Case) -> None:
    prepared = observed(case.build(), case, "ptq")
    grids = [name for name, fq in fake_quantizers(prepared) if not isinstance(fq, WeightFakeQuantize)]
    assert len(grids) == len(set(grids))
    y, _ = prepared(case.input(), expose=True)
    assert len(y.unique()) <= 256


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_any_memory_layout_of_the_input_gives_the_same(case: Case, backend: str) -> None:
    prepared = observed(case.build(), case, "ptq", backend)
    int8 = convert(prepared)
    x = case.input()
    expected = int8(x)
    for other in (x.to(memory_format=torch.channels_last), torch.cat([x, x], 1)[:, :3], x.flip(3).flip(3)):
        if backend == "reference":  # floats add up in another order
            assert sqnr(expected, int8(other)) >= 40
        else:
            assert torch.equal(int8(other), expected)
    assert expected.view(2, -1).shape[0] == 2


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_an_int8_model_changes_neither_its_input_nor_itself(case: Case, backend: str) -> None:
    int8 = convert(observed(case.build(), case, "ptq", backend))
    x = case.input()
    before, first = x.clone(), int8(x)
    assert torch.equal(int8(x), first)
    assert torch.equal(x, before)


@torch.no_grad()
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_fake_quantized_net_is_near_the_float_one(case: Case) -> None:
    net = case.build().eval()
    x = case.input()
    expected = net(x)
    assert sqnr(expected, observed(net, case, "ptq")(x)) > 20


def test_the_family_covers_every_kind_of_call() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert isinstance(CASES[0].build(), Between)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in itertools.islice(CASES, 0, None, 10):
            if "even kernel" not in case.name:
                case.build().eval()(case.input())
