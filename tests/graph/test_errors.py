"""Bad input: a typed error that names the layer or the argument, and a model that is as it was."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from qlightning import (
    Backend,
    QConfig,
    QScheme,
    QuantizationError,
    calibrate,
    convert,
    load,
    prepare,
    quantize_model,
    report,
    save,
)
from qlightning.backends import available, backends
from qlightning.errors import BackendError, CalibrationError, CaptureError, ConfigError, InputError, NonFiniteError
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph.programs import Captured
from qlightning.observers import HistogramObserver, MinMaxObserver, Observer


def build() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def str_shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape))


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def facts(net: nn.Module) -> Any:
    """All that can be seen of a model: classes, attributes, modes, tensors."""
    return (
        [(name, type(m), m.training, sorted(vars(m)), list(m._forward_pre_hooks)) for name, m in net.named_modules()],
        {name: (id(value), value.tolist()) for name, value in (*net.named_parameters(), *net.named_buffers())},
    )


def raises(net: nn.Module, error: type[Exception], match: str, act: Callable[[], Any]) -> None:
    before = facts(net)
    with pytest.raises(error, match=match) as caught:
        act()
    assert isinstance(caught.value, QuantizationError)
    assert facts(net) == before


class Refusing(nn.Module):
    """No observer."""


def _weight_norm() -> nn.Module:
    net = build()
    nn.utils.weight_norm(net[0])
    return net


def _spectral_norm() -> nn.Module:
    net = build()
    nn.utils.spectral_norm(net[4])
    return net


def _parametrized() -> nn.Module:
    net = build()
    parametrize.register_parametrization(net[4], "weight", nn.Identity())
    return net


def _new_weight_norm() -> nn.Module:
    net = build()
    parametrizations.weight_norm(net[0])
    return net


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) if x.sum() > 0 else x


class Functional(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    "net, options, error, match",
    [
        (build, {"backend": "onedn"}, ConfigError, r"'onedn'.*Did you mean 'onednn'.*auto, .*reference"),
        (build, {"backend": 3}, ConfigError, r"backend=3.*reference"),
        (build, {"mode": "qta"}, ConfigError, r"mode='qta'.*'qat' or 'ptq'"),
        (build, {"exclude": ("linear",)}, ConfigError, r"'linear' matches no module"),
        (build, {"exclude": ("00",)}, ConfigError, r"Did you mean '0'"),
        (build, {"qconfig": QConfig(overrides={"5": None})}, ConfigError, r"'5' matches no module of Sequential"),
        (build, {"exclude": (nn.LSTM,)}, ConfigError, r"LSTM.* matches no module"),
        (build, {"exclude": ("*",)}, ConfigError, r"left to quantize.*excluded by '\*'"),
        (build, {"qconfig": "int8"}, ConfigError, r"qconfig: a qlightning.QConfig"),
        (build, {"qconfig": QConfig(activation_observer=lambda scheme: Refusing())}, ConfigError, "observer"),
        (build, {"qconfig": QConfig(weight_observer=lambda scheme: Refusing())}, ConfigError, "observer"),
        (_weight_norm, {}, ConfigError, r"^0: its weight.*weight norm.*exclude=\('0',\)"),
        (_spectral_norm, {}, ConfigError, r"^4: its weight.*spectral norm.*exclude=\('4',\)"),
        (_parametrized, {}, ConfigError, r"^4: its weight is parametrized.*remove_parametrizations"),
        (_new_weight_norm, {}, ConfigError, r"^0: its weight is parametrized"),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), {}, ConfigError, r"^0: a lazy layer.*one batch"),
        (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), {}, ConfigError, "nothing to quantize: no convolution"),
        (lambda: nn.LSTM(3, 4), {}, ConfigError, "nothing to quantize"),
        (Looks, {}, QuantizationError, "quantize"),
        (
            lambda: build().double(),
            {},
            ConfigError,
            r"^0: its weight is torch\.float64.*model\.float\(\).*exclude=\('0',\)",
        ),
        (lambda: build().half(), {}, ConfigError, r"^0: its weight is torch\.float16"),
        (lambda: nn.Sequential(*build()[:4], build()[4].bfloat16()), {}, ConfigError, r"^4: .*torch\.bfloat16"),
        (lambda: nn.Sequential(nn.Linear(3, 3), Functional(torch.float64)), {}, ConfigError, r"^1\.weight: .*float64"),
    ],
)
def test_prepare_refuses(net: Callable[[], nn.Module], options: dict, error: type[Exception], match: str) -> None:
    model = net().eval()
    if isinstance(model[0] if isinstance(model, nn.Sequential) else model, nn.LazyConv2d):
        with pytest.raises(error, match=match):
            prepare(model, **options)
        assert type(model[0]) is nn.LazyConv2d
        return
    raises(model, error, match, lambda: prepare(model, **options))


def test_prepare_refuses_what_is_no_module() -> None:
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, not int"):
        prepare(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [_weight_norm, _spectral_norm, _parametrized, _new_weight_norm])
def test_a_computed_weight_can_stay_float(make: Callable[[], nn.Module]) -> None:
    net = make()
    excluded = "4" if make in (_spectral_norm, _parametrized) else "0"
    prepare(net, exclude=(excluded,)).train()
    net(image()).sum().backward()
    net.eval()
    int8 = convert(net)
    assert int8(image()).shape == (2, 2)
    (row,) = report(int8).float_layers
    assert row.name == excluded
    assert "excluded" in row.reason


def test_pruned_layers_train_and_convert() -> None:
    net = build()
    prune.l1_unstructured(net[0], "weight", 0.5)
    prepare(net).train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(image()).square().mean().backward()
        optimizer.step()
    net(image())
    int8 = convert(net.eval())
    zeros = net[0].weight_mask == 0
    assert (int8[0].weight().int_repr()[zeros] == 0).all()
    assert (int8[0].weight().int_repr() == 0).sum() < zeros.numel() * 0.7


def test_schemes_that_kernels_lack_are_refused() -> None:
    if backends()["onednn"].unavailable:
        pytest.skip("no onednn here")
    for qconfig in (
        QConfig(activation=QScheme()),
        QConfig(activation=QScheme(signed=False, axis=1)),
        QConfig(weight=QScheme(axis=0)),
        QConfig(weight=QScheme(signed=False)),
        QConfig(weight=QScheme(symmetric=True, axis=1)),
        QConfig(overrides={"0": QConfig(weight=QScheme())}),
    ):
        net = build()
        raises(
            net,
            BackendError,
            r"'onednn'.*backend='reference'",
            lambda n=net, q=qconfig: prepare(n, q, backend="onednn"),
        )


def test_a_backend_that_this_machine_lacks_says_why() -> None:
    lacking = Backend("imaginary", lower=lambda graph, root: graph, unavailable="it needs a quantum computer.")
    net = build()
    raises(net, BackendError, "quantum", lambda: prepare(net, backend=lacking))


class TestCalibration:
    def test_no_batch(self) -> None:
        net = prepare(build(), mode="ptq")
        raises(net, CalibrationError, "no calibration batch", lambda: calibrate(net, []))
        raises(net, CalibrationError, "No range was observed", lambda: convert(net))

    @pytest.mark.parametrize("mode", ["qat", "ptq"])
    def test_convert_before_any_data(self, mode: str) -> None:
        net = prepare(build(), mode=mode)
        raises(net, CalibrationError, r"training batches \(QAT\) or calibrate", lambda: convert(net))

    def test_training_batches_in_eval_mode(self) -> None:
        net = prepare(build()).eval()
        net(image())
        raises(net, CalibrationError, r"call net\.train\(\) before them\. It is in eval mode now", lambda: convert(net))

    @pytest.mark.parametrize("data", [image(), {"x": image()}, "images", 3, None], ids=lambda v: type(v).__name__)
    def test_data_that_are_no_batches(self, data: Any) -> None:
        one_batch = isinstance(data, (Tensor, dict))
        match = f"iterable of batches, got a {type(data).__name__}" + (r"; did you mean \[x\]\?" if one_batch else "")
        net = prepare(build(), mode="ptq")
        raises(net, ConfigError, match, lambda: calibrate(net, data))
        other = build()
        raises(other, ConfigError, match, lambda: quantize_model(other, data))

    @pytest.mark.parametrize("count", [0, -1, 1.5, True, "all"])
    def test_number_of_batches(self, count: Any) -> None:
        net = prepare(build(), mode="ptq")
        raises(net, ConfigError, "num_batches", lambda: calibrate(net, [image()], num_batches=count))

    def test_not_prepared(self) -> None:
        net = build()
        raises(net, ConfigError, "not prepared.*prepare", lambda: calibrate(net, [image()]))
        raises(net, ConfigError, "not prepared.*prepare", lambda: convert(net))
        raises(net, ConfigError, "neither prepared nor converted", lambda: report(net))

    def test_a_part_of_a_prepared_model(self) -> None:
        net = prepare(build()).train()
        net(image())
        with pytest.raises(ConfigError, match=r"not prepared|part of"):
            convert(net[0])

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
    def test_a_batch_with_nan_or_infinity_names_batch_and_layer(self, value: float, observer: Any) -> None:
        net = prepare(build(), QConfig(activation_observer=observer), mode="ptq")
        bad = image()
        bad[1, 2, 3, 4] = value
        with pytest.raises(NonFiniteError, match=r"Calibration batch 1: 0_input"):
            calibrate(net, [image(), bad])
        assert not any(fq.observed for _, fq in fake_quantizers(net) if "graph" in _)
        calibrate(net, [image()])
        assert convert(net)(image()).isfinite().all()

    def test_a_layer_that_makes_infinity_is_named(self) -> None:
        net = build()
        with torch.no_grad():
            net[4].weight[0, 0] = float("inf")
        prepare(net, mode="ptq")
        with pytest.raises(NonFiniteError, match=r"Calibration batch 0: 4 \(weight\)"):
            calibrate(net, [image()])

    def test_training_on_nan_names_the_layer(self) -> None:
        net = prepare(build()).train()
        with pytest.raises(NonFiniteError, match="0_input"):
            net(image() * float("nan"))

    def test_a_batch_that_the_forward_does_not_take(self) -> None:
        net = prepare(build(), mode="ptq")
        with pytest.raises((TypeError, RuntimeError)):
            calibrate(net, [torch.randn(2, 5)])
        calibrate(net, [image()])
        assert all(not module.training for module in convert(net).modules())

    def test_a_branch_that_never_ran_is_named(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

            def forward(self, x: Tensor, deep: bool = False) -> Tensor:
                x = self.a(x)
                return self.b(x.relu()) if deep else x

        net = prepare(Net(), mode="ptq")
        calibrate(net, [image()])
        with pytest.warns(UserWarning, match="never seen and stay float: .*a"):
            int8 = convert(net)
        assert int8(image(), deep=True).shape == (2, 3, 8, 8)
        assert [row.name for row in report(int8).float_layers] == ["b"]


def test_quantize_model_leaves_the_float_model_alone() -> None:
    net = build()
    before = facts(net)
    int8 = quantize_model(net, [image()])
    assert facts(net) == before
    assert int8 is not net
    for options, error in (
        ({"calibration_data": []}, CalibrationError),
        ({"calibration_data": [image() * float("inf")]}, NonFiniteError),
        ({"calibration_data": [image()], "backend": "none"}, ConfigError),
        ({"calibration_data": [image()], "exclude": ("x",)}, ConfigError),
    ):
        raises(net, error, "", lambda o=options: quantize_model(net, **o))


def test_an_error_while_the_grids_are_placed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(build(), nn.Linear(2, 2))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("in the middle")

    before = facts(net)
    monkeypatch.setattr(sys.modules["qlightning.graph.prepare"], "bind", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        prepare(net)
    assert facts(net) == before
    assert copy.deepcopy(net)(image()).shape == (2, 2)


def test_messages_are_of_the_family() -> None:
    for error in (ConfigError, BackendError, CaptureError, CalibrationError, NonFiniteError):
        assert issubclass(error, QuantizationError)
        assert issubclass(error, (ValueError, RuntimeError))


class Parts(nn.Module):
    """Python code on values between its parts, a bare layer among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.tail = nn.Conv2d(1, 4, 3), nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.tail(-y if y.sum() > 1e9 else y)


@pytest.mark.filterwarnings("ignore:.*called in one piece")
def test_parts_of_a_model_are_printed_reported_on_and_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 1, 8, 8)
    int8 = quantize_model(Parts().eval(), [x])
    assert "QuantizedLayer" in repr(int8)
    assert int8.conv.bias.shape == (4,)
    assert [row.name for row in report(int8.tail).layers] == ["0"]
    for part, inputs in ((int8.conv, x), (int8.tail, int8.conv(x))):
        save(part, tmp_path / "part.pt2")
        assert torch.equal(load(tmp_path / "part.pt2")(inputs), part(inputs))
    with pytest.raises(
        ConfigError, match=r"int8 parts \(conv, tail\). Save these one by one, such as save\(model.conv"
    ):
        save(int8, tmp_path / "whole.pt2")


def test_a_model_around_one_int8_net_names_it(tmp_path: Path) -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = prepare(nn.Sequential(nn.Linear(4, 2)))

    task = Task()
    with pytest.raises(ConfigError, match=r"Convert its net first: save\(convert\(model.net\), path\)"):
        save(task, tmp_path / "task.pt2")
    task.net(torch.randn(8, 4))
    task.net = convert(task.net)
    with pytest.raises(ConfigError, match=r"its net 'net' is. Save that: save\(model.net, path\)"):
        save(task, tmp_path / "task.pt2")


def test_mistakes_in_observers_and_settings_are_named() -> None:
    class Numbers(Observer):
        def update(self, x: Tensor) -> None: ...

        def range(self) -> Any:
            return 0.0, 1.0

    net, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(8, 4)
    with pytest.raises(ConfigError, match=r"Numbers.range\(\) gave \(float, float\); two tensors are needed"):
        quantize_model(net, [x], observer=Numbers)
    with pytest.raises(ConfigError, match="is called with a QScheme, and"):
        quantize_model(net, [x], observer=lambda: MinMaxObserver(QScheme()))
    with pytest.raises(ConfigError, match=r"a qlightning\.QConfig or None is needed, not a builtins\.str"):
        prepare(net, "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.randn(2, 4, 8, 8), torch.randn(2, 9), torch.randn(1, 1, 3, 8, 8)], ids=str_shape)
@pytest.mark.parametrize("backend", [name for name in ("onednn", "reference", "x86") if name in available()])
def test_an_input_of_a_wrong_shape_is_named(backend: str, x: Tensor) -> None:
    int8 = quantize_model(build().eval(), [image()], backend=backend)
    with pytest.raises(InputError, match=r"'input' is float32 .*; it was made with float32 \(2, 3, 8, 8\)") as error:
        int8(x)
    assert str(tuple(x.shape)) in str(error.value)
    assert error.value.__cause__ is not None
    assert int8(image()[:1]).shape == (1, 2)


def test_errors_are_what_they_were_where_inputs_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = quantize_model(build().eval(), [image()], backend="reference")

    def fails(*_: Any) -> None:
        raise RuntimeError("of its own")

    monkeypatch.setattr(Captured, "run", fails)
    with pytest.raises(RuntimeError, match=r"^of its own$"):
        int8(image()[:1])


def test_an_int8_net_is_not_quantized_again() -> None:
    images = [torch.randn(2, 3, 8, 8)]
    int8 = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), images, backend="reference")
    with pytest.raises(ConfigError, match="is in int8 already"):
        quantize_model(int8, images)


def test_a_report_is_no_pdf(tmp_path: Path) -> None:
    prepared = prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    with pytest.raises(ConfigError, match=r"suffix \.html"):
        report(prepared).save(tmp_path / "report.pdf")
    assert not list(tmp_path.iterdir())
