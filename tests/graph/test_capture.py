"""Forwards of every shape: what goes in, what comes out, what cannot be traced."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning import calibrate, convert, prepare, report, unprepare
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.backends.qdq import NO_KERNEL
from qlightning.errors import CaptureError, ConfigError
from qlightning.fake_quantize import set_fake_quant, set_observers
from qlightning.graph import convert_standalone

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
Output = namedtuple("Output", ["logits", "features"])


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.shape
    if isinstance(value, dict):
        return type(value), {key: structure(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [structure(item) for item in value]
    return type(value), value


def assert_close(expected: Any, found: Any, decibel: float) -> None:
    assert structure(expected) == structure(found)
    for a, b in zip(tensors(expected), tensors(found), strict=True):
        if a.is_floating_point() and a.numel():
            assert sqnr(a, b) >= decibel
        else:
            assert torch.equal(a, b)


def check(net: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]], float_layers: int = 0) -> nn.Module:
    """Float, prepared, fake-quantized and int8 agree for every way of calling; all layers but some are int8."""
    net.eval()
    with torch.no_grad():
        expected = [net(*args, **kwargs) for args, kwargs in calls]
        before = copy.deepcopy(net)
        prepare(net)
        assert net.training is False
        set_fake_quant(net, False)
        set_observers(net, False)
        for (args, kwargs), values in zip(calls, expected, strict=True):
            assert_close(values, net(*args, **kwargs), 90)
        set_fake_quant(net, True)
        set_observers(net, True)
        net.train()
        for _ in range(2):
            for args, kwargs in calls:
                net(*args, **kwargs)
        net.eval()
        for (args, kwargs), values in zip(calls, expected, strict=True):
            assert_close(values, net(*args, **kwargs), 15)
        for backend in BACKENDS:
            int8 = convert(net, backend=backend)
            for args, kwargs in calls:
                assert_close(net(*args, **kwargs), int8(*args, **kwargs), 38)
                assert_close(net(*args, **kwargs), copy.deepcopy(int8)(*args, **kwargs), 38)
            rows = report(int8)
            left = [row for row in rows.float_layers if backend != "x86" or row.reason != NO_KERNEL]
            assert len(left) == float_layers, str(rows)
            assert rows.int8_layers
            assert type(int8).__name__ == type(before).__name__
            assert isinstance(int8, type(before))
    return int8


def call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


class TestArguments:
    def test_flags_keywords_and_two_inputs(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.fc = conv(), conv(), nn.Linear(4, 5)

            def forward(self, a: Tensor, b: Tensor, *, softmax: bool = False) -> Tensor:
                logits = self.fc((self.a(a) + self.b(b)).mean((2, 3)))
                if softmax:
                    return logits.softmax(-1)
                return logits

        x, y = image(), image()
        check(Net(), call(x, y), call(a=x, b=y), call(x, b=y, softmax=True), call(b=y, a=x, softmax=False))

    def test_optional_tensors(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv()

            def forward(self, x: Tensor, skip: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
                y = self.a(x)
                if skip is not None:
                    y = y + self.b(skip)
                return y if mask is None else y * mask

        x = image()
        check(Net(), call(x), call(x, x), call(x, mask=torch.ones(2, 1, 8, 8)), call(x, None, x[:, :1]))

    @pytest.mark.parametrize("kind", [dict, OrderedDict, tuple, list, Output])
    def test_nested_inputs_and_outputs(self, kind: type) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, inputs: Any) -> Any:
                if kind in (dict, OrderedDict):
                    x = self.a(inputs["x"]) * inputs["scale"]
                    return kind(logits=self.b(x), features=x)
                x = self.a(inputs[0]) * inputs[1]
                return Output(self.b(x), x) if kind is Output else kind([self.b(x), x])

        x = {"x": image(), "scale": torch.tensor(2.0)}
        given = (
            kind(**x) if kind in (dict, OrderedDict) else Output(*x.values()) if kind is Output else kind(x.values())
        )
        check(Net(), call(given))

    @pytest.mark.filterwarnings("error")
    def test_variadic_arguments(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, *images: Tensor, **more: Any) -> Tensor:
                y = self.a(images[0])
                for x in images[1:]:
                    y = y + self.a(x)
                return y * more["factor"] if "factor" in more else y

        check(Net(), call(image()), call(image(), image()), call(image(), factor=2))

    def test_numbers_that_are_computed_with_and_numbers_that_decide(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor, factor: float = 1.0, repeats: int = 1) -> Tensor:
                y = self.a(x) * factor
                for _ in range(repeats):
                    y = y + 1
                return y

        x = image()
        check(Net(), call(x), call(x, 0.5), call(x, 0.25), call(x, 1.0, 3), call(x, repeats=2))

    def test_strings_and_other_objects(self) -> None:
        class Options:
            scale = 3.0

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor, how: str = "sum", options: Any = None) -> Tensor:
                y = self.a(x)
                y = y.sum((2, 3)) if how == "sum" else y.mean((2, 3))
                return y if options is None else y * options.scale

        x = image()
        check(Net(), call(x), call(x, "mean"), call(x, how="sum", options=Options()))

    def test_integer_inputs(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.fc = nn.Embedding(10, 8), nn.Linear(8, 4)

            def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
                return self.fc(self.embedding(tokens)).relu(), lengths + 1

        net = check(Net(), call(torch.randint(10, (2, 5)), torch.tensor([3, 5])))
        assert type(net.embedding) is nn.Embedding

    def test_a_wrong_call_fails_as_in_float(self) -> None:
        net = prepare(nn.Sequential(conv()))
        with pytest.raises(TypeError, match="argument"):
            net()
        with pytest.raises(TypeError, match="argument"):
            net(image(), wrong=1)

    def test_the_signature_stays(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor, softmax: bool = False) -> Tensor:
                """Says what it does."""
                return self.a(x)

        net = Net()
        expected = inspect.signature(net.forward)
        prepare(net)
        assert inspect.signature(net.forward) == expected
        assert net.forward.__doc__ == "Says what it does."
        net.train()
        net(image())
        assert inspect.signature(convert(net).forward) == expected

    def test_a_call_that_int8_has_never_seen_says_what_to_do(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor, how: str = "a") -> Tensor:
                return self.a(x) if how == "a" else self.a(x) + 1

        net = prepare(Net()).train()
        net(image())
        with pytest.raises(CaptureError, match=r"how|'b'"):
            convert(net)(image(), "b")

    def test_outputs_of_classes_of_their_own(self) -> None:
        @dataclass
        class Result:
            logits: Tensor
            features: Tensor

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Result:
                x = self.a(x)
                return Result(self.b(x), features=x)

        net = calibrated(prepare(Net()))
        expected, found = net(image(5)), convert(net)(image(5))
        assert isinstance(found, Result)
        assert found.features.view(5, -1).shape == expected.features.view(5, -1).shape


class TestCalls:
    def test_a_layer_called_twice(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.bn = conv(), conv(4), nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x)
                return self.b(self.bn(self.b(x)) * 3)

        int8 = check(Net(), call(image()))
        assert int8.b.weight().int_repr().shape == (4, 4, 3, 3)

    def test_a_shared_activation(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b, self.act = conv(), conv(4), nn.ReLU(inplace=True)

            def forward(self, x: Tensor) -> Tensor:
                return self.act(self.b(self.act(self.a(x)) * 10)) + 1

        check(Net(), call(image()))

    def test_a_module_under_two_names(self) -> None:
        shared = conv(4)
        check(nn.Sequential(OrderedDict(first=conv(), a=shared, relu=nn.ReLU(), b=shared)), call(image()))

    def test_a_weight_shared_by_two_layers(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
                self.b.weight = self.a.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x).relu())

        net = Net()
        int8 = check(net, call(torch.randn(4, 6)))
        assert net.b.weight is net.a.weight
        assert torch.equal(int8.a.weight().int_repr(), int8.b.weight().int_repr())

    def test_an_embedding_tied_to_the_head(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.body(self.embedding(tokens)).tanh())

        check(Net(), call(torch.randint(9, (3, 4))))

    def test_an_auxiliary_head_in_training_only(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.head, self.aux = conv(), nn.Linear(4, 3), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Any:
                x = self.a(x).mean((2, 3))
                if self.training:
                    return self.head(x), self.aux(x)
                return self.head(x)

        net = Net()
        check(net, call(image()), float_layers=1)
        assert len(net.train()(image())) == 2

    def test_direct_access_to_a_layers_bias(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l1, self.l2 = nn.Linear(6, 6), nn.Linear(6, 6)

            def forward(self, x: Tensor) -> Tensor:
                return self.l2(torch.relu(self.l1(x)) + self.l1.bias) * self.l2.weight.abs().mean()

        check(Net(), call(torch.randn(4, 6)))

    @pytest.mark.parametrize("keywords", [True, False])
    def test_functions_of_a_layers_weight(self, keywords: bool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l1, self.l2 = nn.Linear(6, 6), nn.Linear(6, 6)

            def forward(self, x: Tensor) -> Tensor:
                x = F.linear(x, self.l1.weight, self.l1.bias).relu()
                if keywords:
                    return F.linear(input=x, weight=self.l2.weight, bias=self.l2.bias)
                return F.linear(x, self.l2.weight)

        check(Net(), call(torch.randn(4, 6)))

    def test_graphs_that_call_functions_with_other_parameters(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pre, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))
                self.first, self.second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4) + 5)

            def forward(self, x: Tensor, second: bool = False) -> Tensor:
                return F.linear(self.pre(x), self.weight, self.second if second else self.first)

        x = torch.randn(32, 8)
        check(Net(), call(x), call(x, second=True))

    def test_graphs_that_call_one_weight_as_two_kinds_of_layer(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pre, self.weight = nn.Conv1d(8, 8, 1), nn.Parameter(torch.randn(8, 8, 3))

            def forward(self, x: Tensor, up: bool = False) -> Tensor:
                return (F.conv_transpose1d if up else F.conv1d)(self.pre(x), self.weight)

        x = torch.randn(4, 8, 10)
        check(Net(), call(x), call(x, up=True))

    def test_a_weight_computed_in_the_forward_stays_float(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.scale = conv(), nn.Parameter(torch.ones(4, 4, 1, 1))

            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(self.a(x), self.scale * 2)

        check(Net(), call(image()))

    def test_in_place_calls(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x)
                x += 1
                x.mul_(2).clamp_(0, 3)
                y = self.b(x)
                y.add_(x)
                F.relu_(y)
                return y

        check(Net(), call(image()))

    def test_shapes_in_the_forward_are_free(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                y = F.max_pool2d(self.a(x), 2)
                y = F.interpolate(y, size=x.shape[-2:])
                n, c, h, w = y.shape
                return self.b(y.view(n, c, h * w).reshape(n, c, h, w)).flatten(1).view(x.size(0), -1)

        int8 = check(Net(), call(image()))
        assert int8(torch.randn(5, 3, 12, 10)).shape == (5, 4 * 120)

    def test_tensors_made_in_the_forward(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x) * torch.tensor(2.0) + torch.arange(4.0).view(4, 1, 1)
                total = torch.zeros(4, 8, 8)
                total += x.mean(0)
                blurred = F.conv2d(x, torch.ones(4, 1, 3, 3) / 9, padding=1, groups=4)
                return self.b(torch.where(x > 0, blurred, torch.zeros(()))) + total

        net = Net()
        keys = list(net.state_dict())
        check(net, call(image()))
        assert [key for key in net.state_dict() if "fake_quant" not in key] == keys
        assert not any("constant" in key for key in net.state_dict())
        unprepare(net)
        assert list(net.state_dict()) == keys

    @pytest.mark.filterwarnings("error")
    def test_tensors_made_of_a_size_known_at_run_time(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.position, self.fc = conv(), nn.Embedding(64, 4), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x).flatten(2).transpose(1, 2)
                b, n, c = x.shape
                x = x + self.position(torch.arange(n, device=x.device))
                x = torch.cat([torch.zeros(b, 1, c), x, torch.full((b, 2, c), 0.5)], 1)
                return self.fc(x) * torch.ones(x.size(1), 1)

        int8 = check(Net(), call(image()))
        assert int8(torch.randn(3, 3, 5, 5)).shape == (3, 28, 3)

    @pytest.mark.parametrize(
        "pick",
        [
            lambda x: x.flatten(2).topk(4, -1).values,
            lambda x: x.flatten(2).max(-1)[0][:, :, None],
            lambda x: x.flatten(2).sort(-1).values[..., :4],
            lambda x: x.flatten(2).mT.transpose(1, 2),
        ],
    )
    def test_tensors_in_attributes_of_results(self, pick: Any) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.fc = conv(), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.fc(pick(self.a(x)).mean(-1))

        check(Net(), call(image()))

    def test_layers_with_names_that_containers_use(self) -> None:
        net = nn.Module()
        for name in ("float", "keys", "values", "type", "training_", "weight"):
            net.add_module(name, conv(4)) if not hasattr(net, name) else None
        names = list(dict(net.named_children()))

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem = conv()
                for name in names:
                    self.add_module(name, conv(4))

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                for name in names:
                    x = getattr(self, name)(x).float()
                return x

        assert {"keys", "values"} <= set(names)
        check(Net(), call(image()))

    def test_hooks_fire(self) -> None:
        net = nn.Sequential(OrderedDict(body=nn.Sequential(conv(), nn.ReLU()), head=conv(4), tail=conv(4)))
        fired: list[str] = []
        net.register_forward_hook(lambda *_: fired.append("net"))
        net.body.register_forward_hook(lambda *_: fired.append("body"))
        net.body[0].register_forward_hook(lambda *_: fired.append("conv"))
        net.head.register_forward_pre_hook(lambda *_: fired.append("head"))
        prepare(net).train()
        net(image())
        assert fired == ["conv", "body", "head", "net"]
        fired.clear()
        int8 = convert(net)
        int8(image())
        assert fired == ["conv", "body", "head", "net"]
        assert [layer.name for layer in report(int8).int8_layers] == ["tail"]

    def test_hooks_of_loading_get_the_int8_net(self) -> None:
        seen: list[nn.Module] = []
        net = nn.Sequential(conv(), nn.ReLU(), conv(4))
        net.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
        int8 = convert(calibrate(prepare(net, mode="ptq"), [image()]))
        del net
        gc.collect()
        for model in (int8, copy.deepcopy(int8)):
            model.load_state_dict(int8.state_dict())
            assert seen.pop() is model


class TestModules:
    def test_attributes_and_methods_stay(self) -> None:
        class Net(nn.Module):
            names = ("a", "b")

            def __init__(self) -> None:
                super().__init__()
                self.a, self.num_classes, self.settings = conv(), 4, {"depth": 3}
                self.register_buffer("mean", torch.tensor([1.0]))

            @property
            def width(self) -> int:
                return self.a.out_channels

            def loss(self, x: Tensor) -> Tensor:
                return self(x).square().mean()

            def forward(self, x: Tensor) -> Tensor:
                return self.a(x - self.mean)

        net = prepare(Net())
        assert (net.num_classes, net.settings, net.width, net.names) == (4, {"depth": 3}, 4, ("a", "b"))
        net.train().loss(image()).backward()
        assert net.a.weight.grad is not None
        int8 = convert(net)
        assert (int8.num_classes, int8.settings, int8.names) == (4, {"depth": 3}, ("a", "b"))
        assert int8.loss(image()).ndim == 0
        assert not any(module.training for module in int8.train().modules())

    def test_a_sequential_stays_a_list(self) -> None:
        net = nn.Sequential(conv(), nn.ReLU(), conv(4))
        layers = list(net)
        prepare(net)
        assert len(net) == 3
        assert list(net) == layers
        assert net[0] is layers[0]
        assert net[-1] is layers[-1]
        assert list(net[:2]) == layers[:2]
        int8 = convert(net.train() if net(image()) is None else calibrated(net))
        assert len(int8) == 3
        assert int8[-1].weight().int_repr().shape == (4, 4, 3, 3)

    @pytest.mark.parametrize(
        "layer, x",
        [
            (nn.Linear(6, 4), torch.randn(5, 6)),
            (nn.Conv2d(3, 4, 3, padding="same"), torch.randn(2, 3, 8, 8)),
            (nn.ConvTranspose2d(3, 4, 3, stride=2), torch.randn(2, 3, 4, 4)),
            (nn.Conv1d(3, 4, 3), torch.randn(2, 3, 8)),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_a_layer_is_a_model(self, layer: nn.Module, x: Tensor) -> None:
        layer = copy.deepcopy(layer)
        weight = layer.weight.detach().clone()
        int8 = check(layer, call(x), call(input=x))
        assert sqnr(weight, int8.weight().dequantize()) > 35
        unprepare(layer)
        assert type(layer).__module__.startswith("torch.nn")

    @pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
    def test_a_container_of_models(self, kind: type) -> None:
        parts = {"a": nn.Sequential(conv(), nn.ReLU()), "b": conv()}
        net = kind(parts) if kind is nn.ModuleDict else kind(parts.values())
        prepare(net)
        items = list(net.values()) if kind is nn.ModuleDict else list(net)
        assert len(net) == len(items) == 2
        for item in items:
            item.train()(image())
        int8 = convert(net)
        items = list(int8.values()) if kind is nn.ModuleDict else list(int8)
        assert [item(image()).shape for item in items] == [(2, 4, 8, 8)] * 2
        assert len(report(int8).int8_layers) == 2

    def test_modules_of_lists_and_dicts_inside(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stages = nn.ModuleList([conv(), conv(4), conv(4)])
                self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                for stage in self.stages:
                    x = stage(x).relu()
                x = x.mean((2, 3))
                return {name: head(x) for name, head in self.heads.items()}

        check(Net(), call(image()))

    def test_a_subclass_of_a_layer(self) -> None:
        class Same(nn.Conv2d):
            """Has another constructor, and the forward of its torch layer."""

            def __init__(self, inputs: int, outputs: int) -> None:
                super().__init__(inputs, outputs, 3, padding=1)
                self.tag = "mine"

        class Scaled(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:  # noqa: A002
                return super().forward(input) * 2

        class Standardized(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:  # noqa: A002
                weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
                return self._conv_forward(input, weight, self.bias)

        net = nn.Sequential(Same(3, 4), Scaled(4, 4, 1), Standardized(4, 4, 1), conv(4))
        int8 = check(net, call(image()), float_layers=2)
        assert isinstance(net[0], Same)
        assert net[0].tag == "mine"
        assert "forward of its own" in {row.name: row.reason for row in report(int8).float_layers}["1"]

    def test_a_subclass_of_an_activation(self) -> None:
        class Mine(nn.ReLU):
            def forward(self, input: Tensor) -> Tensor:  # noqa: A002
                return super().forward(input) + 2

        check(nn.Sequential(conv(), Mine(), conv(4)), call(image()))


def calibrated(net: nn.Module) -> nn.Module:
    net.train()
    net(image())
    return net.eval()


class Decides(nn.Module):
    """Its forward looks at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(4), nn.Sequential(conv(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.a(x) + self.b(x)


class Recorder:
    """Holds a value."""

    value: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorder) and vars(self) == vars(other)


class TestUntraceable:
    def test_a_part_that_looks_at_data_is_called_in_one_piece(self) -> None:
        net = nn.Sequential(OrderedDict(stem=conv(), decides=Decides(), head=conv(4)))
        with pytest.warns(
            UserWarning, match=r"decides \(Decides\) cannot be traced at .*test_capture.py:\d+.*x.sum"
        ) as seen:
            prepare(copy.deepcopy(net))
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int8 = check(net, call(image()))
        assert [row.name for row in report(int8).int8_layers] == ["stem", "decides.a", "decides.b.0", "head"]
        assert any("Decides" in note for note in report(int8).notes)
        assert unprepare(net) is net
        assert type(net.decides.a) is nn.Conv2d

    def test_a_whole_model_that_looks_at_data(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.body = conv(), nn.Sequential(conv(4), nn.ReLU(), conv(4))

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                while x.abs().max() > 1:
                    x = x / 2
                return self.body(x)

        with pytest.warns(UserWarning, match="Net cannot be traced"):
            check(Net(), call(image()))

    def test_a_forward_that_writes_to_itself(self) -> None:
        class Remembers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.seen = conv(4), 0

            def forward(self, x: Tensor) -> Tensor:
                self.seen += 1
                return self.a(x)

        net = nn.Sequential(conv(), Remembers())
        with pytest.warns(UserWarning, match=r"Remembers.*self.seen"):
            prepare(net)
        assert net[1].seen == 0
        net.train()(image())
        net(image())
        assert net[1].seen == 2
        int8 = convert(net)
        int8(image())
        assert int8[1].seen == 3
        assert net[1].seen == 2
        assert len(report(int8).int8_layers) == 2

    @pytest.mark.parametrize("kind", ["element", "part", "view", "random"])
    def test_what_a_graph_would_not_repeat_is_called_in_one_piece(self, kind: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                y = self.a(x)
                if kind == "element":
                    y[:, 0] = 0
                elif kind == "part":
                    y[:, 1:3].mul_(5)
                elif kind == "view":
                    y.flatten(1).add_(3)
                elif kind == "random":
                    y = y + torch.rand(4, 1, 1) * 1e-9
                return self.b(y)

        net = Net()
        random = torch.get_rng_state()
        with pytest.warns(UserWarning, match=r"Net cannot be traced at .*test_capture\.py.*(would not|assignment)"):
            prepare(copy.deepcopy(net))
        assert kind != "random" or torch.equal(torch.get_rng_state(), random)
        if kind != "random":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(net, call(image()))

    @pytest.mark.parametrize("kind", ["buffer", "in training", "list", "dict", "nested", "object", "deque"])
    def test_a_forward_that_leaves_something_behind(self, kind: str) -> None:
        class Keeps(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv(4)
                self.register_buffer("steps", torch.zeros((), dtype=torch.long))
                self.kept: Any = {
                    "list": [],
                    "dict": {},
                    "nested": {"y": []},
                    "object": Recorder(),
                    "deque": deque(maxlen=3),
                }.get(kind)

            def forward(self, x: Tensor) -> Tensor:
                y = self.a(x)
                if kind == "buffer" or (kind == "in training" and self.training):
                    self.steps += 1
                elif kind == "dict":
                    self.kept["y"] = y
                elif kind == "nested":
                    self.kept["y"].append(y)
                elif kind == "object":
                    self.kept.value = y
                elif kind in ("list", "deque"):
                    self.kept.append(y)
                return y

        net = nn.Sequential(conv(), Keeps())
        keys, kept = list(net.state_dict()), copy.copy(net[1].kept)
        with pytest.warns(
            UserWarning, match=r"1 \(Keeps\) cannot be traced at .*test_capture\.py:\d+.*self\.(steps|kept)"
        ):
            prepare(net)
        assert type(net[1].steps) is Tensor
        assert [key for key in net.state_dict() if key in keys] == keys
        assert net[1].kept == kept
        net.train()
        for count in (1, 2):
            y = net(image())
            found = {
                "list": lambda: net[1].kept[-1],
                "deque": lambda: net[1].kept[-1],
                "dict": lambda: net[1].kept["y"],
                "nested": lambda: net[1].kept["y"][-1],
                "object": lambda: net[1].kept.value,
            }
            assert found[kind]() is y if kind in found else net[1].steps == count
        assert len(report(convert(net.eval())).int8_layers) == 2

    @pytest.mark.parametrize("kind", ["random", "numpy", "own", "generator"])
    def test_randomness_outside_torch_is_drawn_at_every_call(self, kind: str) -> None:
        class Draws(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.own, self.generator = conv(4), random.Random(3), torch.Generator()
                self.sizes = np.random.default_rng(3)

            def forward(self, x: Tensor) -> Tensor:
                draw = {
                    "random": random.random,
                    "numpy": lambda: np.random.rand() + self.sizes.random(),
                    "own": self.own.random,
                    "generator": lambda: torch.rand((), generator=self.generator),
                }[kind]
                return self.a(x) + draw()

        net = nn.Sequential(conv(), Draws())
        before = random.getstate(), np.random.get_state()[2], net[1].own.getstate(), net[1].sizes.bit_generator.state
        with pytest.warns(UserWarning, match=r"Draws\) cannot be traced.*random numbers"):
            prepare(net)
        after = random.getstate(), np.random.get_state()[2], net[1].own.getstate(), net[1].sizes.bit_generator.state
        assert after == before
        x = image()
        assert not torch.equal(net(x), net(x))

    def test_nothing_left_names_the_code(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 3))

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, self.weight) if x.sum() > 0 else x

        with pytest.raises((CaptureError, ConfigError), match="quantize"):
            prepare(Net())

    @pytest.mark.filterwarnings("ignore")
    def test_an_untraceable_call_of_a_traceable_model(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor, threshold: Tensor | None = None) -> Tensor:
                y = self.a(x)
                if threshold is not None and y.sum() > threshold:
                    y = y + 1
                return y

        net = prepare(Net()).train()
        net(image())
        with pytest.raises(CaptureError, match=r"test_capture\.py"):
            net(image(), torch.tensor(0.0))

    def test_compiled_and_wrapped_models_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"torch\.compile.*prepare first"):
            prepare(torch.compile(nn.Sequential(conv())))
        with pytest.raises(ConfigError, match=r"1 is wrapped by torch\.compile"):
            prepare(nn.Sequential(conv(), torch.compile(conv(4))))
        with pytest.raises(ConfigError, match=r"DataParallel.*prepare first"):
            prepare(nn.DataParallel(nn.Sequential(conv())))

    def test_a_model_under_ddp_is_refused(self) -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(conv()))
            with pytest.raises(ConfigError, match=r"wrapped by DDP.*prepare first"):
                prepare(wrapped)
        finally:
            torch.distributed.destroy_process_group()

    def test_models_inside_models_keep_their_classes(self) -> None:
        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.scale = conv(), 2.0

            def forward(self, x: Tensor) -> Tensor:
                return self.a(x) * self.scale

            def score(self, x: Tensor) -> Tensor:
                return self(x).mean()

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.b = Inner(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.inner(x))

        net = Outer()
        int8 = check(net, call(image()))
        for model in (net, int8):
            assert isinstance(model.inner, Inner)
            assert model.inner.scale == 2.0
        assert net.inner.score(image()).ndim == 0
        with pytest.raises(CaptureError, match="call that model"):
            int8.inner.score(image())

    @pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
    def test_a_scripted_part_stays_float(self) -> None:
        scripted = torch.jit.trace(nn.Sequential(conv(4)), torch.randn(1, 4, 8, 8))
        net = calibrated(prepare(nn.Sequential(conv(), scripted, conv(4))))
        assert len(report(convert(net)).int8_layers) == 2


class TestModes:
    def test_inside_inference_mode(self) -> None:
        net = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv(4))
        with torch.inference_mode():
            prepare(net, mode="ptq")
            calibrate(net, [image()])
            int8 = convert(net)
            int8(image())
        int8(image())
        assert not any(buffer.is_inference() for buffer in [*net.buffers(), *int8.buffers()])
        net.train()(image()).sum().backward()
        assert net[0].weight.grad is not None

    def test_under_no_grad_and_autocast(self) -> None:
        net = nn.Sequential(conv(), nn.ReLU(), conv(4))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            prepare(net)
        net.train()(image()).sum().backward()
        assert net[0].weight.grad is not None


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


reverse = Reversed.apply


@torch.no_grad()
def frozen(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


class TestGradients:
    """Gradients reach the parameters that they reach in float, and have the same values."""

    @pytest.mark.parametrize(
        "kind",
        ["with", "decorated", "inference", "set", "parts", "two outputs", "function", "checkpoint", "none"],
    )
    def test_what_the_forward_says_about_gradients(self, kind: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.backbone, self.head = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), conv(4)

            def forward(self, x: Tensor) -> Any:
                if kind == "with":
                    with torch.no_grad():
                        y = self.backbone(x)
                elif kind == "decorated":
                    y = frozen(self.backbone, x)
                elif kind == "inference":
                    with torch.no_grad():
                        y = self.backbone(x) * x.shape[1]
                elif kind == "set":
                    before = torch.is_grad_enabled()
                    torch.set_grad_enabled(False)
                    y = self.backbone(x)
                    torch.set_grad_enabled(before)
                elif kind == "parts":
                    with torch.no_grad():
                        parts = self.backbone(x).chunk(2, 1)
                    y = torch.cat([parts[1], parts[0]], 1)
                elif kind == "two outputs":
                    with torch.no_grad():
                        y = self.backbone(x)
                    return self.head(y), y
                elif kind == "function":
                    y = Reversed.apply(self.backbone(x), -3.0)
                elif kind == "checkpoint":
                    y = torch.utils.checkpoint.checkpoint(self.backbone, x, use_reentrant=True)
                else:
                    y = self.backbone(x)
                return self.head(y)

        net = Net().train()
        x = image().requires_grad_(kind == "checkpoint")
        reference = copy.deepcopy(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(net)
        set_fake_quant(net, False)
        gradients = []
        for model in (reference, net):
            tensors(model(x))[0].square().sum().backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        for name, expected in gradients[0].items():
            found = gradients[1][name]
            assert (expected is None) == (found is None), name
            if expected is not None and expected.norm() > 1e-3:
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        set_fake_quant(net, True)
        net.train()(image())
        assert len(report(convert(net.eval())).int8_layers) == 2

    @pytest.mark.parametrize("kind", ["left off", "written", "autocast", "alias"])
    def test_modes_that_a_graph_would_not_repeat(self, kind: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor) -> Tensor:
                y = self.a(x)
                if kind == "written":
                    with torch.no_grad():
                        y.mul_(2)
                elif kind == "autocast":
                    with torch.autocast("cpu", enabled=False):
                        return self.b(y)
                elif kind == "alias":
                    y = reverse(y, -3.0)
                else:
                    torch.set_grad_enabled(False)
                return self.b(y)

        with pytest.warns(UserWarning, match="Net cannot be traced.*(gradients|no_grad|autocast|by another name)"):
            prepare(Net())
        assert torch.is_grad_enabled()


class Writes(nn.Module):
    """One convolution, and another that reads what a call has changed in place."""

    def __init__(self, between: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.between = conv(), conv(4), between
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.a(x))


def shifted(m: Any, y: Tensor) -> Tensor:
    skip = y
    y += 1
    return m.b(y) + skip


def listed(m: Any, y: Tensor) -> Tensor:
    found = [y]
    y += m.b(y.relu())
    return found[0] * 2


def viewed(m: Any, y: Tensor) -> Tensor:
    part = y.view(y.shape[0], -1)
    y += 1
    return m.b(y) + part.view(y.shape)


def halved(m: Any, y: Tensor) -> Tensor:
    p, q = y.chunk(2, 1)
    p += q
    return m.b(y)


def sliced(m: Any, y: Tensor) -> Tensor:
    part = y[:, :1]
    y.relu_()
    return m.b(y) + part


def through(m: Any, y: Tensor) -> Tensor:
    return m.b(m.act(m.same(y))) + y


def contiguous(m: Any, y: Tensor) -> Tensor:
    y.contiguous().relu_()
    return m.b(y)


def positional(m: Any, y: Tensor) -> Tensor:
    F.relu(y, True)
    return m.b(y)


def counted(m: Any, y: Tensor) -> Tensor:
    size = half = y.shape[1]
    half //= 2
    return m.b(y) * size + half


def block(m: Any, y: Tensor) -> Tensor:
    z = m.block(y)
    return m.b(y) + z


class TestInPlace:
    """What a call changes in place is changed for all that reads it, in float, prepared and int8."""

    @pytest.mark.parametrize("between", [shifted, listed, positional, counted], ids=lambda f: f.__name__)
    def test_a_graph_says_it(self, between: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(Writes(between))
        check(Writes(between), call(image()))

    @pytest.mark.parametrize("between", [viewed, halved, sliced, contiguous], ids=lambda f: f.__name__)
    def test_a_graph_cannot_say_it(self, between: Any) -> None:
        with pytest.warns(UserWarning, match="Writes cannot be traced.*in place"):
            prepare(Writes(between))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(Writes(between), call(image()))

    @pytest.mark.filterwarnings("ignore:.*cannot be traced")
    @pytest.mark.parametrize("same", [nn.Identity(), nn.Dropout(), nn.Flatten(0, 0)], ids=lambda m: type(m).__name__)
    def test_through_a_module_that_gives_its_input_back(self, same: nn.Module) -> None:
        check(Writes(through, same=same, act=nn.ReLU(inplace=True)), call(image()))

    @pytest.mark.filterwarnings("ignore:.*cannot be traced")
    @pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Sequential(nn.Identity(), nn.ReLU6(True)), Decides()])
    def test_a_float_block_that_writes_to_its_input(self, first: nn.Module) -> None:
        net = Writes(block, block=nn.Sequential(first, conv(4)))
        net.eval()
        expected = net(image := torch.randn(2, 3, 8, 8))
        prepare(net, exclude=("block",)).train()
        for _ in range(3):
            net(image)
        net.eval()
        for backend in BACKENDS:
            assert sqnr(expected, convert(net, backend=backend)(image)) > 20

    def test_a_float_block_that_writes_elsewhere_is_no_reason(self) -> None:
        inner = nn.Sequential(conv(4), nn.ReLU(inplace=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(Writes(block, block=inner), exclude=("block",))

    def test_a_value_is_a_tensor(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Any) -> Tensor:
                if isinstance(x, (list, tuple)):
                    x = x[0]
                y = self.a(x)
                if not torch.is_tensor(y) or not isinstance(y.relu(), Tensor) or isinstance(self.a.weight, int):
                    return y
                assert isinstance(self.a.weight, nn.Parameter)
                return self.b(y) if isinstance(y.shape[0], int) else y

        check(Net(), call(image()), call([image()]))

    def test_a_class_that_is_not_known_is_refused(self) -> None:
        class Either(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return (x, x) if x.sum() > 0 else (x, x, x)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.either, self.b = conv(), nn.Sequential(conv(4), Either()), conv(4)

            def forward(self, x: Any) -> Tensor:
                y = self.either(self.a(x))
                return self.b(y if isinstance(y, Tensor) else y[0])

        with pytest.warns(UserWarning, match="Net cannot be traced.*class of a value"):
            prepare(Net(), exclude=("either",))

    def test_a_value_kept_in_a_global_is_refused(self) -> None:
        kept: list[Tensor] = []

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Any) -> Tensor:
                kept.append(self.a(x))
                return kept[-1]

        with pytest.warns(UserWarning, match="Net cannot be traced.*outside"):
            prepare(Net())


class Stateful(nn.Module):
    """Reads plain values of itself and of a part."""

    default = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv(4)
        self.inner = Temperature()
        self.return_features, self.mode, self.sizes, self.options = False, "sum", [1, 2], {"scale": 1.0}
        self.config = SimpleNamespace(shift=0.5)
        self.unread = 0

    @property
    def doubled(self) -> float:
        return self.inner.t * 2

    def forward(self, x: Tensor) -> Any:
        y = self.inner(self.a(x)) * self.default * self.options["scale"] + self.config.shift + self.doubled
        y = self.b(y) * sum(self.sizes)
        y = y + 1 if self.mode == "sum" else y * 2
        return (y, y.relu()) if self.return_features else y


class Temperature(nn.Module):
    """Divides by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.t = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) / self.t


class TestState:
    """Plain values and modes of the modules count as they are at the call, not as they were in the trace."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m.inner, "t", 4.0),
            lambda m: setattr(m, "return_features", True),
            lambda m: setattr(m, "mode", "other"),
            lambda m: setattr(m, "default", 3),
            lambda m: m.sizes.append(3),
            lambda m: m.options.update(scale=3.0),
            lambda m: setattr(m.config, "shift", -1.0),
            lambda m: m.inner.train(),
        ],
        ids=["number", "flag", "string", "class", "list", "dict", "namespace", "mode"],
    )
    def test_a_change_after_prepare(self, change: Any) -> None:
        net = Stateful().eval()
        x = image()
        changed = copy.deepcopy(net)
        change(changed)
        before = net(x)
        torch.manual_seed(0)
        expected = changed(x)
        prepare(net)
        set_fake_quant(net, False)
        set_observers(net, False)
        assert_close(before, net(x), 90)
        count = len(net._captured.programs[next(iter(net._captured.programs))])
        net.unread = 1
        assert_close(before, net(x), 90)
        assert len(net._captured.programs[next(iter(net._captured.programs))]) == count
        change(net)
        torch.manual_seed(0)
        assert_close(expected, net(x), 90)
        set_fake_quant(net, True)
        set_observers(net, True)
        net.train()(x)
        net.eval()
        for backend in BACKENDS:
            int8 = convert(net, backend=backend)
            assert_close(changed.eval()(x), int8(x), 15)

    def test_a_state_that_int8_has_never_seen_is_named(self) -> None:
        net = calibrated(prepare(Stateful()))
        int8 = convert(net)
        int8(image())
        int8.inner.t = 7.0
        with pytest.raises(CaptureError, match=r"inner\.t"):
            int8(image())

    def test_the_epoch_of_a_lightning_module(self) -> None:
        class Lit(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor) -> Tensor:
                return self.a(x) * (1 + self.current_epoch)

        net = Lit().eval()
        x = image()
        expected = net(x)
        prepare(net)
        set_fake_quant(net, False)
        assert_close(expected, net(x), 90)
        net._trainer = SimpleNamespace(current_epoch=3)
        assert_close(expected * 4, net(x), 90)
        set_fake_quant(net, True)
        for epoch in range(8):
            net._trainer.current_epoch = epoch
            net(x)
        net._trainer.current_epoch = 8
        with pytest.warns(UserWarning, match="traced anew for every value of .*current_epoch"):
            net(x)
        net.train()(x)
        net._trainer.current_epoch = 1
        net.eval()
        assert_close(expected * 2, convert_standalone(net)(x), 20)

    def test_the_mode_of_a_part(self) -> None:
        net = nn.Sequential(OrderedDict(a=conv(), body=Temperature(), b=conv(4)))
        prepare(net).train()
        net.body.eval()
        x = image()
        assert torch.equal(net(x), net(x))
        net.body.train()
        assert not torch.equal(net(x), net(x))
        net.eval().body.train()
        assert not torch.equal(net(x), net(x))


class Doubles:
    """A hook that changes the result and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> Any:
        self.calls += 1
        return args[0] * 2 if output is None else output * 2

    def __deepcopy__(self, memo: Any) -> Doubles:
        return self


class TestHooks:
    @pytest.mark.parametrize("kind", ["after", "before"])
    @pytest.mark.parametrize("name", ["conv", "bn", "relu", "last"])
    @pytest.mark.parametrize("late", [False, True])
    def test_hooks_of_torchs_modules_run_in_int8(self, kind: str, name: str, late: bool) -> None:
        net = nn.Sequential(
            OrderedDict(first=conv(), conv=conv(4), bn=nn.BatchNorm2d(4), relu=nn.ReLU(), mid=conv(4), last=conv(4))
        )
        module, hook = net.get_submodule(name), Doubles()

        def register() -> None:
            (module.register_forward_hook if kind == "after" else module.register_forward_pre_hook)(hook)

        net.eval()
        if not late:
            register()
        prepare(net).train()
        if late:
            register()
        for _ in range(3):
            net(image())
        net.eval()
        x = image()
        expected = net(x)
        for backend in BACKENDS:
            int8 = convert(net, backend=backend)
            hook.calls = 0
            assert sqnr(expected, int8(x)) > 25
            assert hook.calls == 1
            rows = {row.name: row.reason for row in report(int8).float_layers}
            assert list(rows) == ([name] if name in ("conv", "last") else [])
            assert all("hooks" in reason for reason in rows.values())


class Branches(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 100:
            return x
        return self.part(x)


class TestStructure:
    @pytest.mark.filterwarnings("ignore:.*cannot be traced")
    @pytest.mark.parametrize("inline", [False, True])
    def test_a_part_of_two_untraceable_modules(self, inline: bool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                shared = nn.Sequential(conv(4), nn.ReLU(), conv(4))
                self.first, self.shared = conv(), shared
                self.a, self.b = Branches(shared), Branches(shared)

            def forward(self, x: Tensor, more: bool = False) -> Tensor:
                y = self.b(self.a(self.first(x)))
                y = self.shared(y) if inline else y
                return y + 1 if more else y

        net = Net()
        check(net, call(image()), call(image(), more=True))
        unprepare(net)
        assert type(net.shared) is nn.Sequential
        assert type(net.shared[0]) is nn.Conv2d

    @pytest.mark.parametrize("how", ["children", "modules"])
    def test_a_loop_over_children(self, how: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = conv(), conv(4)

            def forward(self, x: Tensor, scale: str = "one") -> Tensor:
                for layer in self.children() if how == "children" else self._modules.values():
                    x = layer(x)
                return x * 2 if scale == "two" else x

        net = Net()
        check(net, call(image()), call(image(), "two"))
        assert list(net._modules) == ["a", "b", "graph_fake_quant"]

    @pytest.mark.parametrize("make", [lambda: defaultdict(list), OrderedDict, Counter], ids=["default", "ordered", "c"])
    def test_outputs_in_mappings(self, make: Any) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = conv()

            def forward(self, x: Tensor) -> Any:
                out = make()
                out["y"] = self.a(x)
                return out

        net = Net()
        check(net, call(image()))
        assert getattr(net(image()), "default_factory", None) in (None, list)

    @pytest.mark.parametrize("layer", [False, True])
    def test_a_forward_that_is_an_attribute(self, layer: bool) -> None:
        def forward(self: Any, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight * 2, padding=1) if layer else self[1](self[0](x)) * 3

        net = nn.Sequential(conv(), conv(4))
        target = net[0] if layer else net
        target.forward = MethodType(forward, target)
        with nullcontext() if layer else pytest.warns(UserWarning, match="Sequential cannot.*define it in a class"):
            prepare(net)
        unprepare(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(net, call(image()), float_layers=int(layer))


class TestOpaque:
    """Attention, recurrent nets and embeddings stay float; the layers around them become int8."""

    def test_attention(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.attention, self.b = (
                    nn.Linear(8, 8),
                    nn.MultiheadAttention(8, 2, batch_first=True),
                    nn.Linear(8, 4),
                )

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x)
                return self.b(self.attention(x, x, x, need_weights=False)[0] + x)

        int8 = check(Net(), call(torch.randn(2, 5, 8)), float_layers=1)
        (row,) = report(int8).float_layers
        assert "MultiheadAttention" in row.reason

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
    def test_recurrent(self, kind: type) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.rnn, self.fc = nn.Embedding(9, 6), kind(6, 8, batch_first=True), nn.Linear(8, 3)

            def forward(self, tokens: Tensor) -> Tensor:
                out, _ = self.rnn(self.embedding(tokens))
                return self.fc(out[:, -1])

        check(Net(), call(torch.randint(9, (2, 5))))

    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("kind", ["layer", "encoder"])
    def test_transformer_encoder(self, kind: str, norm_first: bool) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        net = layer if kind == "layer" else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        flags = [m.activation_relu_or_gelu for m in net.modules() if isinstance(m, nn.TransformerEncoderLayer)]
        float_layers = 1 if kind == "layer" else 2
        x = torch.randn(2, 5, 8)
        int8 = check(net, call(x), float_layers=float_layers)
        assert len(report(int8).int8_layers) == 2 * float_layers
        with torch.no_grad():
            assert sqnr(net.eval()(x), Float.of(net)(x)) < 60  # it does round
        unprepare(net)
        assert [m.activation_relu_or_gelu for m in net.modules() if isinstance(m, nn.TransformerEncoderLayer)] == flags

    def test_a_transformer_encoder_inside(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
                self.embed, self.encoder, self.fc = nn.Linear(6, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                return self.fc(self.encoder(self.embed(x), src_key_padding_mask=mask).mean(1))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(Net(), call(torch.randn(2, 5, 6)), float_layers=1)


class Float:
    """The float net that a prepared one was."""

    @staticmethod
    def of(prepared: nn.Module) -> nn.Module:
        return unprepare(copy.deepcopy(prepared)).eval()


@torch.fx.wrap
def attention_in_one_piece(x, weight):
    return x if x.shape[0] > 100 else nn.functional.linear(x, weight)


def test_a_weight_that_goes_to_a_function_is_reported_with_its_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return attention_in_one_piece(self.first(x), self.inner.weight)

    net = prepare(Net(), backend="reference")
    (row,) = report(net).float_layers
    assert row.name == "inner"
    assert "attention_in_one_piece()" in row.reason
