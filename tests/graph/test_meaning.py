"""Calls that mean another thing than their name alone says: int8 computes what the float net computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning import QConfig, QScheme, calibrate, convert, prepare, report
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.backends.qdq import NO_KERNEL
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """first -> a forward that is given -> its convolution ``last``, as far as it calls that."""

    def __init__(self, function: Forward, channels: int = 8, **members: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(channels, 8, 3, padding=1)
        self.offset = nn.Parameter(torch.randn(1, 8, 1, 1))
        for name, value in members.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


@torch.no_grad()
def assert_float_says_the_same(net: nn.Module, *float_layers: str) -> None:
    """The fake-quantized and the int8 net are near the float one; a wrong meaning is at 12 dB and less."""
    net.eval()
    x = torch.randn(4, 8, 8, 8)
    expected = net(x)
    prepare(net, QConfig(activation_observer=MinMaxObserver), backend=BACKENDS[0], mode="ptq")
    calibrate(net, [x])
    assert sqnr(expected, net(x)) >= 25
    for backend in BACKENDS:
        int8 = convert(net, backend=backend)
        assert sqnr(net(x), int8(x)) >= 38
        left = [row for row in report(int8).float_layers if backend != "x86" or row.reason != NO_KERNEL]
        assert {row.name for row in left} == set(float_layers)


FACTS: dict[str, Forward] = {
    "dtype": lambda m, y: m.last(y) + m.offset.to(y.dtype),
    "dtype of an inner value": lambda m, y: m.last(y.relu()) + m.offset.to(y.dtype),
    "dtype of a new tensor": lambda m, y: m.last(y) + torch.full((1,), 0.4, dtype=y.dtype),
    "is_floating_point": lambda m, y: m.last(y) + m.offset * y.is_floating_point(),
    "new_full": lambda m, y: m.last(y) + y.new_full((1,), 0.4) + y.new_ones(1) + y.new_zeros(1),
    "full_like": lambda m, y: m.last(y) + torch.full_like(y, 0.4) + torch.ones_like(y) + torch.zeros_like(y),
    "type_as": lambda m, y: m.last(y) + m.offset.type_as(y),
    "to another": lambda m, y: m.last(y) + m.offset.to(y),
    "type": lambda m, y: m.last(y) + m.offset.type(y.type()),
    "bytes": lambda m, y: m.last(y) + m.offset * y.element_size() * y.itemsize * y.nbytes / y.numel(),
    "item": lambda m, y: m.last(y) + m.offset * y.max().item() * y.abs().mean().item(),
    "tolist": lambda m, y: m.last(y) + m.offset * y[0, 0, 0].tolist()[0],
    "view of bits": lambda m, y: m.last(y.view(torch.int32).view(torch.float32)),
    "stride": lambda m, y: m.last(y.as_strided((4, 8, 8, 8), y.stride())),
    "as_strided": lambda m, y: m.last(torch.as_strided(y.relu(), (4, 8, 8, 8), (512, 64, 8, 1))),
    "shape, device, dimensions": lambda m, y: m.last(y) + torch.ones(y.shape[1:], device=y.device) * y.ndim * y.dim(),
}
ARITHMETIC: dict[str, Forward] = {
    "rsub": lambda m, y: torch.rsub(y, 1),
    "rsub of tensors": lambda m, y: torch.rsub(y, y.relu()),
    "rsub alpha": lambda m, y: torch.rsub(y, 1, alpha=2),
    "__rsub__": lambda m, y: y.__rsub__(1),
    "__radd__": lambda m, y: y.__radd__(1),
    "1 - y": lambda m, y: 1 - y,
    "sub alpha": lambda m, y: torch.sub(y, y.relu(), alpha=2),
    ".sub alpha": lambda m, y: y.sub(1, alpha=2),
    "add alpha": lambda m, y: torch.add(y, 1, alpha=3),
    "add alpha by position": lambda m, y: torch.add(y, 2, y.relu()),
    "add, numpy's names": lambda m, y: torch.add(x1=y, x2=y.relu()),
    "1 / y": lambda m, y: 1 / (y.abs() + 1),
    "__rtruediv__": lambda m, y: (y.abs() + 1).__rtruediv__(1),
    "true_divide": lambda m, y: torch.true_divide(y, 2),
    "div rounding": lambda m, y: torch.div(y, 1e-3, rounding_mode="floor"),
    "floor division": lambda m, y: y // 1e-3,
    "a slope read at run time": lambda m, y: F.leaky_relu(y, m.offset.mean().item()),
}
NUMPY_NAMES: dict[str, Forward] = {
    "cat": lambda m, y: torch.cat([y[:, :4], y[:, 4:].relu()], axis=1),  # type: ignore[call-overload]
    "mean": lambda m, y: y.mean(axis=1, keepdims=True).repeat(1, 8, 1, 1),  # type: ignore[call-overload]
    "unsqueeze": lambda m, y: torch.unsqueeze(x=y, axis=0).squeeze(axis=0),  # type: ignore[call-arg]
    "chunk": lambda m, y: torch.cat(torch.chunk(y, 2, dim=1)[::-1], axis=1),  # type: ignore[call-overload]
    "relu": lambda m, y: torch.relu(x=y),  # type: ignore[call-arg]
    "clamp": lambda m, y: torch.clamp(x=y, min=-1, max=1),  # type: ignore[call-overload]
}
PICKED: dict[str, Forward] = {
    "max": lambda m, y: y.max(dim=1, keepdim=True)[0].repeat(1, 8, 1, 1),
    "max values": lambda m, y: y.max(dim=1, keepdim=True).values.repeat(1, 8, 1, 1),
    "sort": lambda m, y: y.sort(dim=1)[0],
    "topk": lambda m, y: torch.topk(y, 8, dim=1)[0],
    "max_pool2d": lambda m, y: F.max_pool2d(y, 2, 2, 0, 1, False, True)[0],
    "max_pool2d by keyword": lambda m, y: F.max_pool2d(y, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("name", FACTS)
def test_questions_about_a_value_are_about_the_float_value(name: str) -> None:
    assert_float_says_the_same(Net(FACTS[name]))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    assert_float_says_the_same(Net(lambda m, y: m.last(ARITHMETIC[name](m, y))))


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_arguments_by_the_names_that_numpy_gives_them(name: str) -> None:
    assert_float_says_the_same(Net(lambda m, y: m.last(NUMPY_NAMES[name](m, y))))


@pytest.mark.parametrize("name", PICKED)
def test_a_tensor_out_of_a_tuple_has_a_grid(name: str) -> None:
    assert_float_says_the_same(Net(lambda m, y: m.last(PICKED[name](m, y))))


class Pair(nn.Module):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x), x.mean((2, 3), keepdim=True)


@torch.no_grad()
def test_the_layer_after_an_excluded_module_with_several_results_is_int8() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.conv = Pair(), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y, mean = self.pair(x)
            return self.conv(y) + mean

    net, x = Two().eval(), torch.randn(4, 8, 8, 8)
    expected = net(x)
    prepare(net, exclude=("pair",), mode="ptq")
    int8 = convert(calibrate(net, [x]))
    assert [row.name for row in report(int8).int8_layers] == ["conv"]
    assert sqnr(expected, int8(x)) >= 25


def doubled(cls: Any, *args: Any) -> nn.Module:
    """A torch module of a subclass whose forward gives twice the result."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return cls.forward(self, x) * 2

    return type(f"Doubled{cls.__name__}", (cls,), {"forward": forward})(*args)


def patched(module: nn.Module) -> nn.Module:
    """A module whose own forward, set on the instance, gives twice the result."""
    original = module.forward
    module.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: doubled(nn.BatchNorm2d, 8),
        lambda: doubled(nn.SyncBatchNorm, 8),
        lambda: doubled(nn.ReLU),
        lambda: doubled(nn.Hardswish),
        lambda: doubled(nn.MaxPool2d, 2),
        lambda: doubled(nn.AvgPool2d, 2),
        lambda: doubled(nn.Identity),
        lambda: doubled(nn.ZeroPad2d, 1),
        lambda: patched(nn.ReLU()),
        lambda: patched(nn.BatchNorm2d(8)),
    ],
)
def test_a_subclass_with_a_forward_of_its_own_is_not_its_base(build: Callable[[], nn.Module]) -> None:
    net = Net(lambda m, y: m.last(m.op(y)), op=build())
    bn = net.op
    if isinstance(bn, nn.modules.batchnorm._BatchNorm):
        bn.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]
    assert_float_says_the_same(net)


@pytest.mark.parametrize("build", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_the_batch_norms_of_torch_fold(build: Callable[[int], nn.Module]) -> None:
    net = Net(lambda m, y: m.last(m.op(y)), op=build(8)).eval()
    prepare(net, mode="ptq")
    int8 = convert(calibrate(net, [torch.randn(2, 8, 8, 8)]))
    assert type(int8.op) is nn.Identity


FUNCTIONS: dict[str, Forward] = {
    "bias": lambda m, y: F.conv2d(y, m.conv.weight, m.conv.bias * 2, padding=1),
    "weight": lambda m, y: F.conv2d(y, m.conv.weight * 2, m.conv.bias, padding=1),
    "geometry": lambda m, y: F.conv2d(y, m.conv.weight, m.conv.bias, padding=y.shape[2] // 8),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_layer_function_with_a_computed_argument_stays_float(what: str) -> None:
    net = Net(lambda m, y: m.last(FUNCTIONS[what](m, y)), conv=nn.Conv2d(8, 8, 3))
    assert_float_says_the_same(net, "conv")
    (row,) = report(net).float_layers
    assert (
        row.reason
        == {
            "bias": "its weight goes to conv2d() beside a bias that the forward computes",
            "weight": "its weight goes to mul(), which is called in one piece",
            "geometry": "its weight goes to conv2d() beside a geometry that the forward computes",
        }[what]
    )


def test_a_layer_called_with_more_than_its_input_says_so() -> None:
    net = Net(lambda m, y: m.last(m.up(y, output_size=[17, 17])), up=nn.ConvTranspose2d(8, 8, 3, stride=2))
    assert_float_says_the_same(net, "up")
    (row,) = report(net).float_layers
    assert row.reason == "called with output_size beside its input"


def test_a_layer_called_with_and_without_more_than_its_input() -> None:
    up = nn.ConvTranspose2d(8, 8, 3, stride=2)
    net = Net(lambda m, y: m.last(m.up(m.up(y, output_size=[17, 17]))), up=up)
    assert_float_says_the_same(net, "up")


class Named(nn.Module):
    """Has members under every name that int8 models and grids give to what they add."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv_1, self.conv_input = (nn.Conv2d(8, 8, 1) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(8, 8, 1, 1))
        self.part = nn.ModuleDict({"conv": nn.Conv2d(8, 8, 1)})
        self.part_conv = nn.Conv2d(8, 8, 1)
        for name in ("table", "table_0", "table_1", "conv_bias_float", "conv_input_scale", "float_conv_bias"):
            self.register_buffer(name, torch.randn(8, 1, 1))
        self.conv_call1, self.weight_quantized = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor, small: Tensor) -> Tensor:
        y = F.silu(self.conv_input(self.conv(x) * 50))
        y = F.silu(self.conv_1(self.conv(y * 0.1)))
        y = self.part_conv(self.part["conv"](y).relu() * 30)
        y = F.conv2d(F.silu(y), self.weight) + (small + x).mean()
        for name in ("table", "table_0", "table_1", "conv_bias_float", "conv_input_scale", "float_conv_bias"):
            y = y + getattr(self, name)
        return self.conv_call1(y) + self.weight_quantized(y) + self.conv.bias.view(-1, 1, 1)


@torch.no_grad()
@pytest.mark.parametrize("axis", [None, 1])
def test_what_is_added_never_takes_a_name_of_the_users(axis: int | None) -> None:
    net = Named().eval()
    x, small = torch.randn(4, 8, 8, 8), torch.randn(4, 8, 8, 8) * 0.01
    usable = [name for name in BACKENDS if name == "reference" or axis is None]
    expected = net(x, small)
    qconfig = QConfig(activation=QScheme(signed=False, axis=axis), activation_observer=MinMaxObserver)
    prepare(net, qconfig, backend=usable[0], mode="ptq")
    grids = [fq for _, fq in fake_quantizers(net)]
    assert len({id(fq) for fq in grids}) == len({fq.name for fq in grids})
    calibrate(net, [(x, small)])
    assert sqnr(expected, net(x, small)) >= 20
    for backend in usable:
        int8 = convert(net, backend=backend)
        assert sqnr(net(x, small), int8(x, small)) >= 38
        for name, buffer in Named.named_buffers(net, recurse=False):
            assert torch.equal(int8.get_buffer(name), buffer)


@torch.no_grad()
def test_two_inputs_of_one_call_have_a_grid_each() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor, small: Tensor) -> Tensor:
            return self.conv(x + small)

    net = prepare(Sum(), mode="ptq")
    calibrate(net, [(torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4) * 1e-3)])
    scales = sorted(float(fq.scale) for _, fq in fake_quantizers(net) if not isinstance(fq, WeightFakeQuantize))
    assert scales[0] < 0.01 * scales[1]


class Experts(nn.Module):
    """Rows go to one of two experts, by their first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        low = x[:, 0] < 0
        x = self.stem(x)
        return self.head(torch.cat([self.experts[0](x[low]), self.experts[1](x[~low])]))


@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageObserver, HistogramObserver])
@pytest.mark.parametrize("mode", ["qat", "ptq"])
def test_an_expert_without_a_row_waits_for_one(mode: Any, observer: Any) -> None:
    low, high = -torch.rand(16, 6), torch.rand(16, 6)
    both = torch.cat([low, high])

    def observed(batches: list[Tensor]) -> nn.Module:
        net = prepare(Experts(), QConfig(activation_observer=observer), mode=mode)
        if mode == "ptq":
            return calibrate(net, batches)
        for batch in batches:
            net.train()(batch).sum().backward()
        return net.eval()

    net = observed([low, high])
    int8 = convert(net)
    assert report(int8).float_layers == []
    with torch.no_grad():
        assert sqnr(net(both), int8(both)) >= 38
        assert int8(low).shape == (16, 2)

    net = observed([low, low])
    with pytest.warns(UserWarning, match=r"never seen and stay float: .*experts\.1"):
        int8 = convert(net)
    assert {row.name for row in report(int8).float_layers} == {"experts.1.0", "experts.1.2"}
    with torch.no_grad():
        assert sqnr(net(both), int8(both)) >= 38
