"""The layers of a prepared model: their torch layer with the weight on a grid, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from qlightning import QConfig, QScheme
from qlightning.affine import quantize
from qlightning.errors import NonFiniteError
from qlightning.fake_quantize import WeightFakeQuantize, swap_channels
from qlightning.nn.qat import TWINS, bn_factor, layer_type, swap_in, swap_out
from qlightning.observers import MinMaxObserver

torch.manual_seed(0)
LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(6, 4), (3, 6)),
    (nn.Linear(6, 4, bias=False), (2, 3, 6)),
    (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 8)),
    (nn.Conv2d(4, 6, 3, stride=2, groups=2, padding_mode="circular", padding=1), (2, 4, 8, 8)),
    (nn.Conv3d(4, 6, 2, dilation=2), (2, 4, 4, 4, 4)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 8)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2), (2, 4, 4, 4)),
    (nn.ConvTranspose3d(4, 6, 2), (2, 4, 3, 3, 3)),
]
every_layer = pytest.mark.parametrize("layer, shape", LAYERS, ids=lambda v: type(v).__name__)


def per_channel_reference(weight: Tensor, axis: int) -> Tensor:
    """The weight on an 8-bit symmetric grid a channel along an axis, in float64 and channel by channel."""
    slices = []
    for part in weight.double().unbind(axis):
        scale = float(part.abs().max().float() / 127)
        slices.append((part / scale).round().clamp(-127, 127) * scale)
    return torch.stack(slices, axis)


@every_layer
def test_the_forward_is_that_of_the_weight_on_its_grid(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer)
    other = copy.deepcopy(layer).double()
    transposed = "Transpose" in type(layer).__name__
    swap_in(layer, "layer", QConfig(), None)
    layer.train()
    x = torch.randn(shape)
    y = layer(x)
    weight = other.weight.detach()
    if transposed and layer.groups > 1:
        parts = [per_channel_reference(part, 1) for part in weight.chunk(layer.groups)]
        other.weight.data = torch.cat(parts)
    else:
        other.weight.data = per_channel_reference(weight, int(transposed))
    torch.testing.assert_close(y.double(), other(x.double()), rtol=1e-4, atol=1e-4)


@every_layer
def test_a_layer_comes_back_as_it_was(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer)
    kind, attributes = type(layer), set(vars(layer))
    parameters = list(layer.parameters())
    x = torch.randn(shape)
    expected = layer(x)
    swap_in(layer, "layer", QConfig(), None)
    assert isinstance(layer, kind)
    assert layer_type(layer) is kind
    assert type(layer) is TWINS[kind]
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    swap_out(layer)
    assert type(layer) is kind
    assert set(vars(layer)) == attributes
    assert torch.equal(layer(x), expected)


@every_layer
def test_the_new_fake_quantizer_has_the_mode_of_the_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    for mode in (True, False):
        other = copy.deepcopy(layer).train(mode)
        swap_in(other, "layer", QConfig(), None)
        assert all(module.training is mode for module in other.modules())


def test_transposed_convolutions_take_an_output_size() -> None:
    layer = nn.ConvTranspose2d(4, 4, 3, stride=2)
    x = torch.randn(1, 4, 4, 4)
    expected = layer(x, output_size=[10, 10])
    swap_in(layer, "layer", QConfig(), None)
    assert torch.equal(layer.eval()(x, output_size=[10, 10]), expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_swapped_channels_swap_back(groups: int) -> None:
    weight = torch.randn(8, 3, 2, 2)
    swapped = swap_channels(weight, groups)
    assert swapped.shape == (3 * groups, 8 // groups, 2, 2)
    assert torch.equal(swap_channels(swapped, groups), weight)
    for group in range(groups):
        part = weight[group * 8 // groups : (group + 1) * 8 // groups]
        assert torch.equal(swapped[group * 3 : (group + 1) * 3], part.transpose(0, 1))


def test_bn_factor_is_one_where_gamma_is_zero() -> None:
    bn = nn.BatchNorm2d(3, eps=0.5)
    bn.running_var.copy_(torch.tensor([0.5, 1.5, 3.5]))
    with torch.no_grad():
        bn.weight.copy_(torch.tensor([2.0, 0.0, -4.0]))
    torch.testing.assert_close(bn_factor(bn), torch.tensor([2.0, 1.0, -2.0]))
    torch.testing.assert_close(bn_factor(nn.BatchNorm2d(2, affine=False, eps=3.0)), torch.full((2,), 0.5))


def test_a_per_tensor_grid_is_that_of_the_folded_weight() -> None:
    layer, bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    with torch.no_grad():
        bn.weight.copy_(torch.tensor([1.0, -20.0, 0.01, 3.0]))
    scheme = QScheme(symmetric=True)
    swap_in(layer.train(), "layer", QConfig(weight=scheme), bn)
    factor = bn_factor(bn).view(-1, 1, 1, 1)
    folded = layer.weight.detach() * factor
    ours = layer.fake_quantized_weight().detach() * factor
    scale = folded.abs().max() / 127.5
    assert (ours - folded).abs().max() <= 0.51 * scale
    codes = quantize(folded, scale, torch.tensor(0), scheme)
    torch.testing.assert_close(ours, codes * scale, rtol=1e-4, atol=1e-6)
    assert layer.weight_fake_quant.scale.numel() == 1


def test_gradients_are_those_of_the_weight_inside_its_grid() -> None:
    layer = nn.Linear(5, 3)
    swap_in(layer.train(), "layer", QConfig(), None)
    x = torch.randn(4, 5)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(3, 5))


class OwnMinMax(MinMaxObserver):
    """The same statistic, which the shortcut for the usual observer does not know."""


@pytest.mark.parametrize("narrow_range", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 3), (300, 40, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shortcut_for_weights_changes_nothing(
    shape: tuple[int, ...], bits: int, narrow_range: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    scheme = QScheme(bits=bits, symmetric=True, axis=0, narrow_range=narrow_range)
    weight = torch.randn(shape)
    weight[1] = 0
    weight[2] *= 1e-30
    weight[3] = weight[3].abs()
    results = []
    for kind in (MinMaxObserver, OwnMinMax):
        fq = WeightFakeQuantize(scheme, kind(scheme))
        fq.allocate(shape[0])
        for factor in (1.0, 0.5):  # the second time, smaller: a range is that of the weight as it is
            x = (weight * factor).to(dtype).requires_grad_()
            out = fq(x)
        out.backward(torch.ones_like(out))
        results.append((out, x.grad, *fq.state_dict().values()))
        assert fq.observer.seen_shapes == [shape]
        assert fq.seen_ndims == {len(shape)}
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [MinMaxObserver, OwnMinMax])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(kind: type[MinMaxObserver], wrong: float) -> None:
    scheme = QScheme(symmetric=True, axis=0, narrow_range=True)
    fq = WeightFakeQuantize(scheme, kind(scheme), "stem")
    fq.allocate(4)
    weight = torch.ones(4, 3)
    weight[2, 1] = wrong
    with pytest.raises(NonFiniteError, match="stem"):
        fq(weight)
