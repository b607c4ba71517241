"""Float in, int8 out, in one call; and a conversion that leaves no trace."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import Tensor, nn

from qlightning import QConfig, QScheme, calibrate, convert, prepare, quantize_model, report
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.errors import ConfigError, NonFiniteError, QuantizationError
from qlightning.observers import (
    EntropyObserver,
    FixedRangeObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    MSEObserver,
    PercentileObserver,
)

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]


class Net(nn.Module):
    """conv-bn-relu6, depthwise, residual, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.depthwise(x))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def image(batch: int = 8) -> Tensor:
    return torch.randn(batch, 3, 8, 8)


@pytest.fixture
def net() -> Net:
    model = Net()
    model.train()
    for _ in range(20):
        model(image())
    return model.eval()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "observer",
    [
        None,
        MinMaxObserver,
        MovingAverageObserver,
        HistogramObserver,
        PercentileObserver,
        MSEObserver,
        EntropyObserver,
        functools.partial(FixedRangeObserver, low=-6.0, high=6.0),
        ao.MinMaxObserver,
        ao.HistogramObserver,
        ao.MovingAverageMinMaxObserver.with_args(averaging_constant=0.1),
        lambda scheme: ao.MinMaxObserver(dtype=torch.quint8),
    ],
)
def test_int8_is_near_float(net: Net, backend: str, observer: Any) -> None:
    int8 = quantize_model(net, [image() for _ in range(4)], observer=observer, backend=backend)
    x = image(32)
    assert sqnr(net(x), int8(x)) > 20
    assert not int8.training
    assert len(report(int8).int8_layers) == 4
    assert "4 of 4 layers in int8" in str(report(int8))


@pytest.mark.parametrize("mode", ["ptq", "qat"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_observers_of_torch_ao_observe_weights_too(net: Net, mode: Any, per_channel: bool) -> None:
    axis = 0 if per_channel else None
    weight = QScheme(bits=7, symmetric=True, axis=axis)
    observer = ao.PerChannelMinMaxObserver if per_channel else ao.MinMaxObserver
    outputs, x = [], image(16)
    data = [image() for _ in range(3)]
    for kind in (observer, MinMaxObserver):
        prepared = prepare(copy.deepcopy(net), QConfig(weight=weight, weight_observer=kind), mode=mode)
        if mode == "ptq":
            calibrate(prepared, data)
        else:
            prepared.train()
            for batch in data:
                prepared(batch).sum().backward()
        outputs.append(convert(prepared)(x))
    assert torch.equal(*outputs)


class Given(nn.Module):
    """An observer of someone else's, with a scale and a zero point whatever it sees."""

    def __init__(self, scale: Any, zero_point: Any, **attributes: Any) -> None:
        super().__init__()
        self.qparams = torch.as_tensor(scale), torch.as_tensor(zero_point)
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.qparams


FOREIGN = {
    "another number of codes": (QScheme(signed=False), ao.HistogramObserver.with_args(reduce_range=True), "0 to 127"),
    "signed": (QScheme(signed=False), ao.MinMaxObserver.with_args(dtype=torch.qint8), "-128 to 127"),
    "symmetric": (QScheme(), ao.MinMaxObserver.with_args(qscheme=torch.per_tensor_symmetric), "per_tensor_symmetric"),
    "per tensor": (QScheme(axis=1), lambda scheme: ao.MinMaxObserver(dtype=torch.qint8), "per_tensor_affine"),
    "another axis": (QScheme(axis=1), ao.PerChannelMinMaxObserver.with_args(ch_axis=0), "ch_axis=0"),
    "by its dtype alone": (QScheme(signed=False), lambda scheme: Given(0.05, 0, dtype=torch.qint8), "torch.qint8"),
    "float zero points": (
        QScheme(signed=False),
        lambda scheme: ao.PerChannelMinMaxObserver(qscheme=torch.per_channel_affine_float_qparams),
        "float_qparams",
    ),
    "no such kind": (QScheme(signed=False), ao.PerChannelMinMaxObserver, "cannot be built for uint8 affine per tensor"),
    "without settings": (QScheme(signed=False), ao.NoopObserver, "cannot be built"),
    "without a grid": (QScheme(signed=False), ao.PlaceholderObserver, "no grid"),
    "without a grid, built": (QScheme(signed=False), lambda scheme: ao.RecordingObserver(), "no grid"),
    "a zero point above": (QScheme(signed=False), lambda scheme: Given(0.05, 256), "0 to 255"),
    "a zero point below": (QScheme(signed=False), lambda scheme: Given(0.05, -1), "0 to 255"),
    "a zero point between": (QScheme(signed=False), lambda scheme: Given(0.05, 128.5), "whole number"),
    "a zero point beside the middle": (QScheme(symmetric=True), lambda scheme: Given(0.05, 3), "middle"),
    "a scale of zero": (QScheme(signed=False), lambda scheme: Given(0.0, 128), "above 0"),
    "a negative scale": (QScheme(signed=False), lambda scheme: Given(-0.05, 128), "above 0"),
    "two scales for one tensor": (QScheme(signed=False), lambda scheme: Given([0.1, 0.2], [0, 0]), "one of each"),
    "another number of zero points": (
        QScheme(signed=False, axis=1),
        lambda scheme: Given([0.1] * 3, [0, 0]),
        "3 and 2",
    ),
}


@pytest.mark.parametrize("scheme, observer, message", FOREIGN.values(), ids=FOREIGN.keys())
def test_an_observer_of_another_grid_is_refused(net: Net, scheme: QScheme, observer: Any, message: str) -> None:
    config = QConfig(activation=scheme, activation_observer=observer)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        quantize_model(net, [image()], qconfig=config, backend="reference")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_names_the_place(net: Net, scale: float) -> None:
    with pytest.raises(NonFiniteError, match=r"\w+: Given gave .*NaN or infin"):
        quantize_model(net, [image()], observer=lambda scheme: Given(scale, 128), backend="reference")


def test_a_range_of_torch_ao_is_the_range_of_the_int8_model(net: Net) -> None:
    x = image(16)
    fixed = ao.FixedQParamsObserver.with_args(scale=1 / 16, zero_point=100)
    expected = quantize_model(net, [image()], observer=lambda scheme: Given(1 / 16, 100), backend="reference")
    assert torch.equal(quantize_model(net, [image()], observer=fixed, backend="reference")(x), expected(x))
    plain = [
        quantize_model(net, [x], observer=kind, backend="reference")(x) for kind in (ao.MinMaxObserver, MinMaxObserver)
    ]
    assert torch.equal(*plain)


@pytest.mark.parametrize(
    "batch", [image(), (image(), torch.zeros(8)), [image(), 3], {"x": image()}], ids=["tensor", "tuple", "list", "dict"]
)
def test_batches_of_any_form(net: Net, batch: Any) -> None:
    assert quantize_model(net, [batch])(image()).shape == (8, 5)
    assert quantize_model(net, iter([batch]))(image()).shape == (8, 5)


def test_excluded_layers_stay_float(net: Net) -> None:
    int8 = quantize_model(net, [image()], exclude=("fc",))
    assert type(int8.fc) is nn.Linear
    assert torch.equal(int8.fc.weight, net.fc.weight)


def test_settings_reach_the_layers(net: Net) -> None:
    config = QConfig(weight=QScheme(bits=4, symmetric=True, axis=0), overrides={"fc": None})
    int8 = quantize_model(net, [image()], qconfig=config, observer=MinMaxObserver, backend="reference")
    assert int8.stem[0].weight().int_repr().abs().max() <= 8
    assert type(int8.fc) is nn.Linear


def test_only_as_many_batches_as_asked(net: Net) -> None:
    prepared = prepare(copy.deepcopy(net), mode="ptq")
    seen: list[int] = []

    def batches() -> Any:
        for index in range(100):
            seen.append(index)
            yield image()

    calibrate(prepared, batches(), num_batches=3)
    assert seen == [0, 1, 2]


def test_calibrating_leaves_modes_weights_and_statistics(net: Net) -> None:
    prepared = prepare(copy.deepcopy(net), mode="ptq").train()
    prepared.fc.eval()
    modes = [module.training for module in prepared.modules()]
    calibrate(prepared, [image()])
    assert [module.training for module in prepared.modules()] == modes
    for name, value in net.state_dict().items():
        assert torch.equal(prepared.state_dict()[name], value)


def test_calibrating_again_adds_to_what_was_seen(net: Net) -> None:
    once = prepare(copy.deepcopy(net), QConfig(activation_observer=MinMaxObserver), mode="ptq")
    twice = copy.deepcopy(once)
    data = [image(), image() * 2]
    calibrate(once, data)
    for batch in data:
        calibrate(twice, [batch])
    ours, theirs = twice.state_dict(), once.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class TestConversion:
    @staticmethod
    def step(prepared: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
        prepared.train()
        for _ in range(2):
            optimizer.zero_grad()
            prepared(image()).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in prepared.state_dict().items()}

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_leaves_the_prepared_model_and_its_training_alone(self, net: Net, backend: str) -> None:
        prepared = prepare(net, backend=backend)
        self.step(prepared)
        other = copy.deepcopy(prepared)
        prepared.train()
        before = {name: value.clone() for name, value in prepared.state_dict().items()}
        modes = [module.training for module in prepared.modules()]
        random = torch.get_rng_state()
        int8 = convert(prepared)
        assert torch.equal(torch.get_rng_state(), random)
        assert [module.training for module in prepared.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
        assert all(p.requires_grad for p in prepared.parameters())
        with_it, without = self.step(prepared), self.step(other)
        assert all(torch.equal(value, without[name]) for name, value in with_it.items())
        x = image()
        assert not torch.equal(convert(prepared)(x), int8(x))

    def test_the_int8_model_shares_nothing_with_the_prepared_one(self, net: Net) -> None:
        prepared = prepare(net)
        self.step(prepared)
        int8 = convert(prepared)
        x = image()
        expected = int8(x)
        with torch.no_grad():
            for tensor in prepared.state_dict().values():
                tensor.zero_()
        assert torch.equal(int8(x), expected)
        assert all(not p.requires_grad for p in int8.parameters())

    def test_twice_gives_the_same(self, net: Net) -> None:
        prepared = prepare(net)
        self.step(prepared)
        x = image()
        assert torch.equal(convert(prepared)(x), convert(prepared)(x))

    def test_a_copy_of_the_int8_model_is_its_own(self, net: Net) -> None:
        int8 = quantize_model(net, [image()])
        other = copy.deepcopy(int8)
        x = image()
        expected = int8(x)
        assert torch.equal(other(x), expected)
        other.fc.codes.zero_()
        other.fc.repack()
        assert not torch.equal(other(x), expected)
        assert torch.equal(int8(x), expected)

    def test_weights_have_the_names_of_the_float_layers(self, net: Net) -> None:
        int8 = quantize_model(net, [image()])
        for name in ("stem.0", "depthwise.0", "project.0", "fc"):
            weight = int8.get_submodule(name).weight()
            assert weight.int_repr().dtype == torch.int8
            assert weight.int_repr().shape == net.get_submodule(name).weight.shape
        assert type(int8.stem[1]) is nn.Identity

    def test_takes_and_gives_float(self, net: Net) -> None:
        int8 = quantize_model(net, [image()])
        out = int8(image(1))
        assert out.dtype == torch.float32
        assert not out.requires_grad
        assert int8.train().training is False

    def test_is_smaller(self, net: Net) -> None:
        int8 = quantize_model(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), [torch.randn(2, 256)])
        size = sum(value.numel() * value.element_size() for value in int8.state_dict().values())
        assert size < 256 * 256 * 2 * 1.1


def test_an_int8_model_takes_no_weights_but_its_own() -> None:
    net = Net().eval()
    one, other = (quantize_model(net, [scale * image()]) for scale in (1, 3))
    one.load_state_dict(one.state_dict())
    trained = quantize_model(Net().eval(), [image()])
    before = other(image(2))
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="takes no other weights"):
        other.load_state_dict(trained.state_dict())
    assert other(image(2)).shape == before.shape


@pytest.mark.parametrize("int8", [False, True])
def test_a_model_that_cannot_be_pickled_says_what_to_save(int8: bool) -> None:
    model = prepare(Net())
    model(image())
    model = convert(model) if int8 else model
    x = image(2)
    with pytest.raises(QuantizationError, match="Save the state dict"):
        pickle.dumps(model)
    assert torch.equal(copy.deepcopy(model.eval())(x), model(x))
    assert torch.equal(copy.copy(model)(x), model(x))


def test_the_state_dict_of_a_prepared_model_gives_the_same_int8_model_elsewhere(tmp_path: Path) -> None:
    model = prepare(Net())
    model(image())
    torch.save(model.state_dict(), tmp_path / "prepared.pt")
    again = prepare(Net())
    again.load_state_dict(torch.load(tmp_path / "prepared.pt", weights_only=True))
    x = image(2)
    assert torch.equal(convert(again)(x), convert(model)(x))
