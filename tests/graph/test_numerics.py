"""Where scales get extreme, grids narrow and precision low: what is trained is what is converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qlightning import QConfig, QScheme, calibrate, convert, prepare
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
PER_CHANNEL = QScheme(symmetric=True, axis=0, narrow_range=True)


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


def block(bias: bool = True) -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
    with torch.no_grad():
        net[1].running_var.uniform_(0.2, 3)
        net[1].running_mean.uniform_(-1, 1)
        net[1].bias.uniform_(-1, 1)
    return net


def trained(net: nn.Module, qconfig: QConfig | None = None, backend: str = "reference") -> nn.Module:
    prepare(net, qconfig, backend=backend).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        net(image()).square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    net(image())
    return net.eval()


def assert_same(prepared: nn.Module, decibel: float = 40, backends: list[str] = BACKENDS) -> None:
    x = image()
    with torch.no_grad():
        expected = prepared(x)
        for backend in backends:
            found = convert(prepared, backend=backend)(x)
            assert found.isfinite().all()
            assert sqnr(expected, found) >= decibel


@pytest.mark.parametrize("weight", [PER_CHANNEL, QScheme(symmetric=True)], ids=["per channel", "per tensor"])
@pytest.mark.parametrize(
    "gamma",
    [[0.0, 1.0, -1.0, 0.5], [0.0] * 4, [-2.0] * 4, [1e-7, 1.0, 1.0, 1.0], [1e-38, 1e-30, -1e-20, 1.0], [1e4, 1, 1, 1]],
    ids=str,
)
def test_gamma_of_any_sign_and_size(gamma: list[float], weight: QScheme) -> None:
    net = block()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor(gamma))
    net[1].weight.requires_grad_(False)
    prepared = trained(net, QConfig(weight=weight), backend=BACKENDS[0])
    assert_same(prepared)
    int8 = convert(prepared)
    zero = torch.tensor(gamma) == 0
    assert (int8[0].weight().int_repr()[zero] == 0).all()


def test_a_variance_of_zero() -> None:
    net = block()
    prepared = trained(net, backend=BACKENDS[0])
    with torch.no_grad():
        net[1].running_var[0] = 0
    assert_same(prepared)


def test_per_tensor_weights_lie_on_the_grid_of_the_folded_weight() -> None:
    prepared = trained(block(), QConfig(weight=QScheme(symmetric=True)), backend=BACKENDS[0])
    conv, bn = prepared[0], prepared[1]
    factor = (bn.weight / (bn.running_var + bn.eps).sqrt()).detach().view(-1, 1, 1, 1)
    weight = convert(prepared)[0].weight()
    assert weight.scale.unique().numel() == 1
    torch.testing.assert_close(conv.fake_quantized_weight() * factor, weight.dequantize(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(conv.weight * factor, weight.dequantize(), rtol=0, atol=0.51 * float(weight.scale[0]))


@pytest.mark.parametrize(
    "scheme",
    [
        QScheme(),
        QScheme(axis=0),
        QScheme(signed=False),
        QScheme(signed=False, axis=0),
        QScheme(signed=False, symmetric=True, axis=0),
        QScheme(symmetric=True, axis=0),
        QScheme(bits=4, symmetric=True, axis=0),
        QScheme(bits=2, symmetric=True, axis=0, narrow_range=True),
        QScheme(bits=5, axis=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("negative", [False, True])
def test_weight_schemes(scheme: QScheme, negative: bool) -> None:
    net = block()
    if negative:
        nn.init.constant_(net[1].weight, -0.7)
    prepared = trained(net, QConfig(weight=scheme))
    codes = convert(prepared)[0].weight().int_repr()
    assert scheme.quant_min <= codes.min()
    assert codes.max() <= scheme.quant_max
    assert_same(prepared, backends=["reference"])


@pytest.mark.parametrize(
    "scheme",
    [
        QScheme(),
        QScheme(symmetric=True),
        QScheme(signed=False, symmetric=True),
        QScheme(bits=4, signed=False),
        QScheme(bits=7, signed=False),
        QScheme(symmetric=True, narrow_range=True),
    ],
    ids=str,
)
def test_activation_schemes(scheme: QScheme) -> None:
    usable = [name for name in BACKENDS if name == "reference" or not scheme.signed]
    for backend in usable:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Hardswish(), nn.Conv2d(4, 2, 1))
        assert_same(trained(net, QConfig(activation=scheme), backend), backends=[backend, "reference"])


def test_activations_per_channel() -> None:
    qconfig = QConfig(activation=QScheme(signed=False, axis=1), activation_observer=MinMaxObserver)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prepared = trained(net, qconfig)
    assert prepared.graph_fake_quant["1"].scale.shape == (4,) if "1" in prepared.graph_fake_quant else True
    assert_same(prepared, backends=["reference"])


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageObserver, HistogramObserver])
@pytest.mark.parametrize("backend", BACKENDS)
def test_relu6_stays_within_its_range(observer: Any, backend: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.ReLU6())
    with torch.no_grad():
        net[0].weight.mul_(10)
        net[2].bias.fill_(9)
    prepare(net, QConfig(activation_observer=observer), backend=backend, mode="ptq")
    int8 = convert(calibrate(net, [image()]))
    y = int8(image() * 100)
    assert y.min() >= 0
    assert y.max() <= 6
    assert y.max() > 5.9


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e3, 1e12])
def test_activations_of_any_size(scale: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    prepare(net, backend=BACKENDS[0], mode="ptq")
    calibrate(net.eval(), [image() * scale])
    for backend in BACKENDS:
        int8 = convert(net, backend=backend)
        x = image() * scale
        assert int8(x).isfinite().all()
        assert sqnr(net(x), int8(x)) >= 40


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e-6, 1.0, 1e12])
def test_a_net_without_bias_quantizes_alike_at_any_size_of_its_input(scale: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)).eval()
    x = image() * scale
    expected = net(x)
    prepare(net, backend=BACKENDS[0], mode="ptq")
    calibrate(net, [x])
    assert sqnr(expected, net(x)) >= 25
    for backend in BACKENDS:
        assert sqnr(net(x), convert(net, backend=backend)(x)) >= 40


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_constant_activations(value: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    x = torch.full((2, 3, 8, 8), value)
    expected = net(x).detach()
    prepare(net, backend=BACKENDS[0], mode="ptq")
    calibrate(net, [x])
    assert sqnr(expected, net(x)) >= 20
    for backend in BACKENDS:
        assert sqnr(net(x), convert(net, backend=backend)(x)) >= 40


def test_values_beyond_the_range_saturate() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    prepare(net, backend=BACKENDS[0], mode="ptq")
    calibrate(net, [image()])
    for backend in BACKENDS:
        int8 = convert(net, backend=backend)
        assert torch.equal(int8(torch.full((1, 3, 4, 4), 1e6)), int8(torch.full((1, 3, 4, 4), 1e30)))


class TestAutocast:
    def test_trains_and_converts(self) -> None:
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 8),
            nn.SiLU(),
            nn.Linear(8, 3),
        )
        prepare(net, backend=BACKENDS[0]).train()
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = net(image())
                loss = out.float().square().mean()
            assert out.dtype == torch.bfloat16
            loss.backward()
            assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in net.parameters())
            optimizer.step()
        state = net.state_dict()
        assert all(value.dtype == torch.float32 for name, value in state.items() if name.endswith("scale"))
        net.eval()
        x = image()
        with torch.no_grad():
            for backend in BACKENDS:
                int8 = convert(net, backend=backend)
                assert sqnr(net(x), int8(x)) >= 38
                with torch.autocast("cpu", torch.bfloat16):
                    assert sqnr(net(x).float(), int8(x).float()) >= 25

    def test_ranges_are_near_those_of_float32(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        other = copy.deepcopy(net)
        x = image()
        prepare(net).train()(x)
        with torch.autocast("cpu", torch.bfloat16):
            prepare(other).train()(x)
        for (name, ours), (_, theirs) in zip(net.named_buffers(), other.named_buffers(), strict=True):
            if name.endswith("scale"):
                torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0)

    def test_half_parameters_keep_the_grid_in_float32(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        prepare(net).train()(image())
        net.bfloat16()
        assert all(value.dtype == torch.float32 for name, value in net.named_buffers() if name.endswith(".scale"))
        net.eval()
        int8 = convert(net)
        x = image().bfloat16()
        assert sqnr(net(x).float(), int8(x).float()) >= 25


class Shared(nn.Module):
    """One convolution, called before one BatchNorm or another, or none: the head of a feature pyramid."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.function = function
        self.bns = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        for index, bn in enumerate(self.bns):
            with torch.no_grad():
                bn.weight.copy_(torch.tensor([0.3, -2.0, 1.0, -0.1]).roll(index) * 10**index)
                bn.running_var.uniform_(0.01 * 50**index, 0.02 * 50**index)
                bn.bias.uniform_(-1, 1)

    def level(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight, self.conv.bias, padding=1) if self.function else self.conv(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self.bns
        return first(self.level(x)), second(self.level(x[:, :, ::2, ::2])), self.level(x[:, :, ::4, ::4])


@pytest.mark.parametrize("function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("mode", ["qat", "ptq"])
@pytest.mark.parametrize(
    "weight",
    [PER_CHANNEL, QScheme(symmetric=True), QScheme(symmetric=True, axis=0), QScheme(axis=0), QScheme(signed=False)],
    ids=str,
)
def test_a_layer_before_several_batch_norms(weight: QScheme, mode: Any, function: bool) -> None:
    usable = [name for name in BACKENDS if name == "reference" or weight.symmetric]
    net, x = Shared(function), image(16)
    prepare(net, QConfig(weight=weight), backend=usable[0], mode=mode)
    if mode == "qat":
        net.train()(x)
    else:
        calibrate(net, [x])
    net.eval()
    with torch.no_grad():
        expected = net(x)
        for backend in usable:
            for ours, theirs in zip(convert(net, backend=backend)(x), expected, strict=True):
                assert sqnr(theirs, ours) >= 40


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_ranges_nor_gradients(use_reentrant: bool) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(128, 4)]
        return prepare(nn.Sequential(*layers)).train()

    plain, checkpointed = net(), net()
    for step in range(3):
        x = (torch.randn(4, 3, 8, 8) * (step + 1)).requires_grad_()
        for module in (plain, checkpointed):
            module.zero_grad()
        plain(x).square().mean().backward()
        out = checkpoint(checkpointed, x, use_reentrant=use_reentrant)
        out.square().mean().backward()
        for ours, expected in zip(checkpointed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)  # type: ignore[arg-type]
    found, expected_state = checkpointed.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected_state.items())
