"""Small nets: one around every call that int8 models know, as module, function and method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.nn.quantized
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning.nn import FloatFunctional

WIDTH, SIZE = 4, 8
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPATIAL = {1: (SIZE,), 2: (SIZE, SIZE), 3: (4, SIZE, SIZE)}


class Between(nn.Module):
    """conv -> op -> layer. With ``expose`` it gives what the op makes, too.

    Args:
        op: A module, or a function of the first convolution's result.
        dims: Spatial dimensions.
        channels: Channels (features) that the op makes.
        last: The layer behind it; None: a convolution.
    """

    def __init__(self, op: Callable[..., Any], dims: int = 2, channels: int = WIDTH, last: nn.Module | None = None):
        super().__init__()
        self.first = CONVS[dims](3, WIDTH, 3, padding=1)
        self.op = op
        self.last = CONVS[dims](channels, 3, 1) if last is None else last

    def forward(self, x: Tensor, expose: bool = False) -> Any:
        y = self.op(self.first(x))
        z = self.last(y)
        return (y, z) if expose else z


class Op(nn.Module):
    """A function as a module, with modules of its own."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Functional(nn.Module):
    """A layer called as a function on parameters that hang on the module."""

    def __init__(self, function: Callable[..., Tensor], like: nn.Module):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(like.weight.detach().clone())
        self.bias = nn.Parameter(like.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


@dataclass(frozen=True)
class Case:
    """One net of the family.

    Attributes:
        name: Of the test.
        op: Builds the op, so that every test has its own.
        dims: Spatial dimensions of the input.
        channels: Those that the op makes.
        last: Builds the layer behind it.
    """

    name: str
    op: Callable[[], Callable[..., Any]]
    dims: int = 2
    channels: int = WIDTH
    last: Callable[[], nn.Module] | None = None

    def __str__(self) -> str:
        return self.name

    def build(self) -> Between:
        """The float net, its BatchNorms with statistics of their own."""
        net = Between(self.op(), self.dims, self.channels, self.last() if self.last is not None else None)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2.0)
                if module.weight is not None:
                    nn.init.uniform_(module.weight, -1.5, 1.5)
                    nn.init.uniform_(module.bias, -0.5, 0.5)
        return net

    def input(self, batch: int = 2, grow: int = 0) -> Tensor:
        """A batch; ``grow`` makes every spatial size larger."""
        return torch.randn(batch, 3, *(size + grow for size in SPATIAL[self.dims]))


def _flat(channels: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(channels, 3)


def _layers() -> list[Case]:
    found = []
    for dims, conv, transposed in (
        (1, nn.Conv1d, nn.ConvTranspose1d),
        (2, nn.Conv2d, nn.ConvTranspose2d),
        (3, nn.Conv3d, nn.ConvTranspose3d),
    ):
        geometries: dict[str, dict[str, Any]] = {
            "plain": {},
            "no bias": {"bias": False},
            "stride": {"stride": 2, "padding": 1},
            "dilation": {"dilation": 2, "padding": 2},
            "groups": {"groups": 2, "padding": 1},
            "depthwise": {"groups": WIDTH, "padding": 1},
            "same": {"padding": "same"},
            "same, even kernel": {"kernel_size": 2, "padding": "same"},
            "valid": {"padding": "valid"},
            "reflect": {"padding": 1, "padding_mode": "reflect"},
            "replicate": {"padding": 1, "padding_mode": "replicate"},
            "circular": {"padding": 1, "padding_mode": "circular"},
            "same, circular": {"padding": "same", "padding_mode": "circular"},
        }
        for name, geometry in geometries.items():
            if dims != 2 and name in ("no bias", "valid", "same, even kernel", "replicate"):
                continue
            options = {"kernel_size": 3, **geometry}
            found.append(Case(f"{conv.__name__} {name}", lambda c=conv, o=options: c(WIDTH, WIDTH, **o), dims))
        transposes: dict[str, dict[str, Any]] = {
            "plain": {},
            "stride, output padding": {"stride": 2, "padding": 1, "output_padding": 1},
            "groups": {"groups": 2, "stride": 2},
            "dilation": {"dilation": 2, "bias": False},
            "wide padding": {"kernel_size": 1, "padding": 1},
        }
        for name, geometry in transposes.items():
            options = {"kernel_size": 3, **geometry}
            found.append(
                Case(f"{transposed.__name__} {name}", lambda t=transposed, o=options: t(WIDTH, WIDTH, **o), dims)
            )
    found += [
        Case("rectangular Conv2d", lambda: nn.Conv2d(4, 4, (3, 1), stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
        Case("Linear on 3-d", lambda: Op(lambda m, x: m.fc(x.flatten(2)), fc=nn.Linear(64, 5)), 2, 5, _flat(5)),
        Case("Linear on 2-d", lambda: Op(lambda m, x: m.fc(x.flatten(1)), fc=nn.Linear(256, 5)), 2, 5, _flat(5)),
        Case("Linear on 1-d", lambda: Op(lambda m, x: m.fc(x[0, 0].flatten()), fc=nn.Linear(64, 5)), 2, 5, _flat(5)),
        Case("Linear on 4-d, no bias", lambda: nn.Linear(SIZE, 5, bias=False), 2, 5, _flat(5)),
        Case("F.conv1d", lambda: Functional(lambda x, w, b: F.conv1d(x, w, b, 2, 1), nn.Conv1d(4, 4, 3)), 1),
        Case(
            "F.conv2d",
            lambda: Functional(
                lambda x, w, b: F.conv2d(x, w, bias=b, padding=1, groups=2), nn.Conv2d(4, 4, 3, groups=2)
            ),
        ),
        Case(
            "F.conv2d same",
            lambda: Functional(lambda x, w, b: F.conv2d(x, w, b, padding="same"), nn.Conv2d(4, 4, 3)),
        ),
        Case(
            "F.conv3d",
            lambda: Functional(lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 2)), nn.Conv3d(4, 4, 3)),
            3,
        ),
        Case(
            "F.linear keywords",
            lambda: Functional(lambda x, w, b: F.linear(input=x.flatten(2), weight=w, bias=b), nn.Linear(64, 5)),
            2,
            5,
            _flat(5),
        ),
        Case(
            "F.conv_transpose2d",
            lambda: Functional(
                lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1, groups=2),
                nn.ConvTranspose2d(4, 4, 3, groups=2),
            ),
        ),
    ]
    return found


def _conv_bn(bn: Callable[[], nn.Module], *behind: nn.Module, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=bias), bn(), *behind)


def _batch_norms() -> list[Case]:
    return [
        Case("conv-bn", _conv_bn(lambda: nn.BatchNorm2d(4))),
        Case("conv-bn no bias", _conv_bn(lambda: nn.BatchNorm2d(4, eps=0.1), bias=False)),
        Case("conv-bn-relu", _conv_bn(lambda: nn.BatchNorm2d(4), nn.ReLU())),
        Case("conv-bn without affine", _conv_bn(lambda: nn.BatchNorm2d(4, affine=False))),
        Case("Conv1d-bn", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), 1),
        Case("Conv3d-bn", lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4)), 3),
        Case(
            "ConvTranspose2d-bn", lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), 2, 6
        ),
        Case("linear-bn", lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 5), nn.BatchNorm1d(5)), 2, 5, _flat(5)),
        Case(
            "linear-bn on 3-d",
            lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 5), nn.BatchNorm1d(4)),
            2,
            5,
            _flat(5),
        ),
        Case("bn-relu-conv", lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU())),
        Case("conv-relu-bn", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))),
        Case("bn without statistics", _conv_bn(lambda: nn.BatchNorm2d(4, track_running_stats=False))),
        Case(
            "a bn read twice",
            lambda: Op(lambda m, x: m.bn(m.conv(x)) + m.bn(x), conv=nn.Conv2d(4, 4, 1), bn=nn.BatchNorm2d(4)),
        ),
        Case(
            "a conv read beside its bn",
            lambda: Op(lambda m, x: (y := m.conv(x)) + m.bn(y), conv=nn.Conv2d(4, 4, 1), bn=nn.BatchNorm2d(4)),
        ),
    ]


def _activations() -> list[Case]:
    modules = [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.ReLU6(),
        nn.Hardtanh(-0.3, 0.4),
        nn.LeakyReLU(0.2),
        nn.ELU(),
        nn.Hardswish(),
        nn.Hardsigmoid(),
        nn.SiLU(),
        nn.SiLU(inplace=True),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.Sigmoid(),
        nn.Tanh(),
    ]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "F.relu": F.relu,
        "F.relu inplace": lambda x: F.relu(x, inplace=True),
        "F.relu6": F.relu6,
        "F.hardtanh": lambda x: F.hardtanh(x, -0.2, max_val=0.5),
        "F.leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.3),
        "F.hardswish": F.hardswish,
        "F.hardsigmoid": F.hardsigmoid,
        "F.silu": F.silu,
        "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
        "F.sigmoid": F.sigmoid,
        "F.tanh": F.tanh,
        "torch.relu": torch.relu,
        "torch.relu_": torch.relu_,
        "torch.sigmoid": torch.sigmoid,
        "torch.tanh": torch.tanh,
        "torch.clamp": lambda x: torch.clamp(x, -0.4, 0.6),
        "clamp to ints": lambda x: x.clamp(0, max=1),
        "clamp_": lambda x: x.clamp_(min=-0.1, max=0.4),
        ".relu": lambda x: x.relu(),
        ".relu_": lambda x: x.relu_(),
        ".sigmoid": lambda x: x.sigmoid(),
        ".tanh_": lambda x: x.tanh_(),
    }
    found = []
    for module in modules:
        found.append(Case(f"conv-{module}", lambda m=module: copy.deepcopy(m)))
        if not getattr(module, "inplace", False):
            found.append(Case(f"pool-{module}", lambda m=module: nn.Sequential(nn.AvgPool2d(2), copy.deepcopy(m))))
            found.append(
                Case(
                    f"linear-{module}",
                    lambda m=module: nn.Sequential(nn.Flatten(), nn.Linear(256, 5), copy.deepcopy(m)),
                    channels=5,
                    last=_flat(5),
                )
            )
    found += [Case(name, lambda f=function: f) for name, function in functions.items()]
    found.append(Case("relu-sigmoid", lambda: nn.Sequential(nn.ReLU(), nn.Sigmoid())))
    found.append(Case("ConvTranspose2d-silu", lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.SiLU())))
    return found


def _named_in(function: Callable[..., Any]) -> dict[str, nn.Module]:
    """The modules that a function calls, of a convolution and a pooling that keep the shape."""
    modules = {"conv": nn.Conv2d(4, 4, 3, padding=1), "pool": nn.AvgPool2d(3, 1, 1)}
    return {name: module for name, module in modules.items() if name in function.__code__.co_names}


def _arithmetic() -> list[Case]:
    def two(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
        return lambda: Op(function, **_named_in(function))

    def shift(m: Any, x: Tensor) -> Tensor:
        x += m.conv(x)
        return x

    def scale(m: Any, x: Tensor) -> Tensor:
        x = x.relu()
        x *= m.conv(x).sigmoid()
        return x

    def by_number(m: Any, x: Tensor) -> Tensor:
        x = m.pool(x)
        x *= 2
        x += 1.5
        return x

    cases = {
        "x + conv": lambda m, x: x + m.conv(x),
        "conv + x": lambda m, x: m.conv(x) + x,
        "relu(x + conv)": lambda m, x: F.relu(x + m.conv(x)),
        "relu_(conv + x)": lambda m, x: torch.add(m.conv(x), x).relu_(),
        "relu6(conv + x)": lambda m, x: F.relu6(m.conv(x) + x),
        "hardswish(conv + x)": lambda m, x: F.hardswish(m.conv(x) + x),
        "conv + conv": lambda m, x: m.conv(x) + m.conv(x * 2),
        "conv.relu + x": lambda m, x: m.conv(x).relu() + x,
        "pool + x": lambda m, x: m.pool(x) + x,
        "relu(pool + x)": lambda m, x: (m.pool(x) + x).relu(),
        "sigmoid(pool + x)": lambda m, x: (m.pool(x) + x).sigmoid(),
        "x + x": lambda m, x: x + x,
        "x.add(y)": lambda m, x: x.add(m.pool(x)),
        "x.add_(y)": lambda m, x: m.pool(x).add_(x),
        "x += conv": shift,
        "add alpha": lambda m, x: torch.add(x, m.pool(x), alpha=2),
        "sum of three": lambda m, x: m.conv(x) + x + m.pool(x),
        "conv + number + x": lambda m, x: m.conv(x) + 0.5 + x,
        "x * pool": lambda m, x: x * m.pool(x),
        "conv * x": lambda m, x: m.conv(x) * x,
        "relu(x * pool)": lambda m, x: (x * m.pool(x)).relu(),
        "x.mul(y)": lambda m, x: x.mul(m.pool(x)),
        "x *= sigmoid(conv)": scale,
        "torch.mul": lambda m, x: torch.mul(m.pool(x), x),
        "x * x": lambda m, x: x * x,
        "add broadcast": lambda m, x: x + x.mean((2, 3), keepdim=True),
        "conv + broadcast": lambda m, x: m.conv(x) + x.mean((2, 3), keepdim=True),
        "broadcast + conv, batch of one": lambda m, x: m.conv(x) + x[:1],
        "mul broadcast": lambda m, x: x * x.mean((2, 3), keepdim=True).sigmoid(),
        "squeeze and excite": lambda m, x: x * F.hardsigmoid(m.conv(F.adaptive_avg_pool2d(x, 1))),
        "x + 1.5": lambda m, x: x + 1.5,
        "2 + pool": lambda m, x: 2 + m.pool(x),
        "x * 0.3": lambda m, x: x * 0.3,
        "-2 * pool": lambda m, x: -2 * m.pool(x),
        "x - 1": lambda m, x: x - 1,
        "1 - pool": lambda m, x: 1 - m.pool(x),
        "x / 2": lambda m, x: x / 2,
        "x.div_(2)": lambda m, x: m.pool(x).div_(2),
        "x.sub(1)": lambda m, x: x.sub(1),
        "x -= 1, in place by numbers": by_number,
        "x - pool": lambda m, x: x - m.pool(x),
        "-x": lambda m, x: -x,
        "two activations": lambda m, x: F.hardtanh(m.conv(x) * 0.7 + 0.1),
    }
    return [Case(name, two(function)) for name, function in cases.items()]


def _cats() -> list[Case]:
    def two(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
        return lambda: Op(function, **_named_in(function))

    return [
        Case("cat of x and pool", two(lambda m, x: torch.cat([x, m.pool(x)], 1)), channels=8),
        Case("cat of x and conv", two(lambda m, x: torch.cat((x, m.conv(x)), dim=1)), channels=8),
        Case("cat of x and x", two(lambda m, x: torch.concat([x, x], dim=-3)), channels=8),
        Case("relu(cat)", two(lambda m, x: torch.cat([x, m.conv(x)], 1).relu()), channels=8),
        Case("cat of cats", two(lambda m, x: torch.cat([torch.cat([x, m.pool(x)], 1), m.conv(x)], 1)), channels=12),
        Case("stack", two(lambda m, x: torch.stack([x, m.pool(x)], 1).flatten(1, 2)), channels=8),
    ]


def _pools() -> list[Case]:
    def same(module: nn.Module, dims: int = 2) -> Case:
        return Case(str(module), lambda: copy.deepcopy(module), dims)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
        "F.max_pool2d keywords": lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1, ceil_mode=True),
        "F.avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (2, 2)),
        "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
        "mean keepdim": lambda x: x.mean((2, 3), keepdim=True),
        "torch.mean": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True),
        "mean then max": lambda x: F.max_pool2d(x.mean(1, keepdim=True).repeat(1, 4, 1, 1), 2),
    }
    return [
        same(nn.MaxPool1d(2), 1),
        same(nn.MaxPool2d(3, 2, 1)),
        same(nn.MaxPool2d(2, dilation=2, ceil_mode=True)),
        same(nn.MaxPool3d(2), 3),
        same(nn.AvgPool1d(3, 2), 1),
        same(nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
        same(nn.AvgPool3d(2), 3),
        same(nn.AdaptiveAvgPool1d(3), 1),
        same(nn.AdaptiveAvgPool2d(1)),
        same(nn.AdaptiveAvgPool2d((3, None))),
        same(nn.AdaptiveAvgPool3d(2), 3),
        same(nn.AdaptiveMaxPool1d(3), 1),
        same(nn.AdaptiveMaxPool2d(2)),
        same(nn.AdaptiveMaxPool3d(2), 3),
        *(Case(name, lambda f=function: f) for name, function in functions.items()),
        Case("F.max_pool1d", lambda: lambda x: F.max_pool1d(x, 2), 1),
        Case("F.avg_pool1d", lambda: lambda x: F.avg_pool1d(x, 2), 1),
        Case("F.max_pool3d", lambda: lambda x: F.max_pool3d(x, 2), 3),
        Case("F.avg_pool3d", lambda: lambda x: F.avg_pool3d(x, 2), 3),
        Case("mean to linear", lambda: lambda x: x.mean((2, 3)), last=_flat(4)),
    ]


def _moves() -> list[Case]:
    def shuffle(x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)

    def chunked(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return torch.cat([left.relu(), right], 1)

    def halves(m: Any, x: Tensor) -> Tensor:
        left, right = torch.split(x, 2, dim=1)
        return m.conv(right) + left

    linear = {"last": _flat(256), "channels": 256}
    images: dict[str, Callable[[Tensor], Tensor]] = {
        "F.pad": lambda x: F.pad(x, (1, 2, 0, 1)),
        "F.pad keywords": lambda x: F.pad(x, pad=[1, 1], mode="constant", value=0.0),
        "F.pad with ones": lambda x: F.pad(x, (1, 1, 1, 1), value=1.0),
        "F.pad reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        "F.pad circular": lambda x: F.pad(x, (1, 1, 1, 1), "circular"),
        "F.pad crop": lambda x: F.pad(x, (-1, -1, 0, 0)),
        "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
        "F.interpolate to a size": lambda x: F.interpolate(x, size=(5, 7), mode="nearest"),
        "F.interpolate to that of x": lambda x: F.interpolate(x[:, :, ::2], size=x.shape[2:]),
        "F.interpolate nearest-exact": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
        "F.interpolate bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        "permute": lambda x: x.permute(0, 1, 3, 2),
        "torch.permute": lambda x: torch.permute(x, (0, 1, 3, 2)),
        "transpose": lambda x: x.transpose(2, 3),
        "torch.transpose": lambda x: torch.transpose(x, -1, -2),
        "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
        "torch.squeeze": lambda x: torch.squeeze(torch.unsqueeze(x, 0), dim=0),
        "reshape": lambda x: x.reshape(x.size(0), -1, x.size(2) * x.size(3), 1),
        "view": lambda x: x.view(x.shape[0], 4, -1, 1),
        "torch.reshape": lambda x: torch.reshape(x, (x.shape[0], 4, -1, 2)),
        "chunk": chunked,
        "split by a method": lambda x: torch.cat([x.split([1, 3], dim=1)[1], x.split([1, 3], 1)[0]], 1),
        "unbind": lambda x: x.unbind(1)[0].unsqueeze(1).expand(-1, 4, -1, -1),
        "slice": lambda x: x[:, :, 1:-1, ::2],
        "slice with ellipsis": lambda x: x[..., :4],
        "narrow": lambda x: x.narrow(2, 1, 4),
        "select": lambda x: x.select(2, 3).unsqueeze(2),
        "channel shuffle": shuffle,
        "F.channel_shuffle": lambda x: F.channel_shuffle(x, 2),
        "flip and roll": lambda x: x.flip(1).roll(1, 2),
        "F.dropout": lambda x: F.dropout(x, 0.2, training=False),
        "clone, contiguous, detach": lambda x: x.clone().contiguous(),
        "repeat": lambda x: x.repeat(1, 1, 2, 1),
    }
    return [
        *(Case(name, lambda f=function: f) for name, function in images.items()),
        Case("nn.ZeroPad2d", lambda: nn.ZeroPad2d((1, 0, 2, 1))),
        Case("nn.ConstantPad2d", lambda: nn.ConstantPad2d(1, 0.7)),
        Case("nn.ReflectionPad2d", lambda: nn.ReflectionPad2d(1)),
        Case("nn.ReplicationPad2d", lambda: nn.ReplicationPad2d(1)),
        Case("nn.ReplicationPad1d", lambda: nn.ReplicationPad1d(2), 1),
        Case("nn.CircularPad2d", lambda: nn.CircularPad2d(1)),
        Case("nn.ConstantPad1d", lambda: nn.ConstantPad1d(2, 0.0), 1),
        Case("nn.ZeroPad3d", lambda: nn.ZeroPad3d(1), 3),
        Case("nn.Upsample", lambda: nn.Upsample(scale_factor=2)),
        Case("nn.Upsample bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
        Case("nn.Upsample 1d", lambda: nn.Upsample(scale_factor=2), 1),
        Case("nn.UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(size=6)),
        Case("nn.ChannelShuffle", lambda: nn.ChannelShuffle(2)),
        Case("nn.PixelShuffle", lambda: nn.PixelShuffle(2), channels=1),
        Case("nn.PixelUnshuffle", lambda: nn.PixelUnshuffle(2), channels=16),
        Case("nn.Dropout", lambda: nn.Dropout(0.3)),
        Case("nn.Dropout2d", lambda: nn.Dropout2d(0.3)),
        Case("nn.Identity", lambda: nn.Identity()),
        Case("nn.Flatten", lambda: nn.Flatten(), **linear),  # type: ignore[arg-type]
        Case("torch.flatten", lambda: lambda x: torch.flatten(x, 1), **linear),  # type: ignore[arg-type]
        Case(".flatten", lambda: lambda x: x.flatten(start_dim=1), **linear),  # type: ignore[arg-type]
        Case(".view to a row", lambda: lambda x: x.view(x.size(0), -1), **linear),  # type: ignore[arg-type]
        Case("nn.Unflatten", lambda: nn.Unflatten(1, (2, 2)), channels=8, last=_flat(8)),
        Case("split into a conv and a sum", lambda: Op(halves, conv=nn.Conv2d(2, 2, 3, padding=1)), channels=2),
    ]


def _functionals() -> list[Case]:
    functions: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
        "add": (lambda m, x: m.f.add(m.conv(x), x), 4),
        "add, relu": (lambda m, x: m.f.add(m.pool(x), x).relu(), 4),
        "add_relu": (lambda m, x: m.f.add_relu(m.conv(x), x), 4),
        "add_relu of pool": (lambda m, x: m.f.add_relu(m.pool(x), x), 4),
        "mul": (lambda m, x: m.f.mul(x, m.pool(x).sigmoid()), 4),
        "cat": (lambda m, x: m.f.cat([x, m.conv(x)], dim=1), 8),
        "add_scalar": (lambda m, x: m.f.add_scalar(x, 1.5), 4),
        "mul_scalar": (lambda m, x: m.f.mul_scalar(m.conv(x), -0.3), 4),
        "matmul": (lambda m, x: m.f.matmul(x, m.conv(x).transpose(-1, -2)), 4),
        "matmul, scaled": (lambda m, x: m.f.mul_scalar(m.f.matmul(x, x.transpose(-1, -2)), 0.2).relu(), 4),
        "matmul of softmax": (lambda m, x: m.f.matmul(m.f.matmul(x, m.pool(x)).softmax(-1), x), 4),
    }
    return [
        Case(
            f"{kind} FloatFunctional {name}",
            lambda f=function, k=cls: Op(f, f=k(), **_named_in(f)),
            channels=channels,
        )
        for name, (function, channels) in functions.items()
        for kind, cls in (("own", FloatFunctional), ("torch.ao", torch.ao.nn.quantized.FloatFunctional))
    ]


CASES = [
    *_layers(),
    *_batch_norms(),
    *_activations(),
    *_arithmetic(),
    *_cats(),
    *_pools(),
    *_moves(),
    *_functionals(),
]
