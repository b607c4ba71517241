"""The backends x86, fbgemm and qnnpack: what they compute, and that they leave the user's engine alone."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlightning import QConfig, calibrate, convert, prepare, report
from qlightning.affine import sqnr
from qlightning.backends import available, backends, engine_kernels, engines, registry, resolve_backend
from qlightning.backends.engine_kernels import running
from qlightning.backends.qdq import NO_KERNEL, QUANTIZE, QParams
from qlightning.errors import BackendError
from qlightning.nn.quantized import QuantizedLayer
from qlightning.observers import MinMaxObserver
from tests.graph.nets import CASES, Case

ENGINES = [name for name in ("x86", "fbgemm", "qnnpack") if name in available()]
GLOBAL = torch.backends.quantized.supported_engines
pytestmark = pytest.mark.skipif(not ENGINES, reason="this torch has none of the engines")


@pytest.fixture(autouse=True)
def users_engine() -> Iterator[str]:
    """The engine that the user has set is the same before and after each test."""
    before = torch.backends.quantized.engine
    yield before
    after, torch.backends.quantized.engine = torch.backends.quantized.engine, before
    assert after == before


def prepared(net: nn.Module, *batches: Tensor, backend: str = "fbgemm") -> nn.Module:
    """The net with observed ranges; those of fbgemm suit all backends."""
    prepare(net.eval(), QConfig(activation_observer=MinMaxObserver), backend=backend, mode="ptq")
    return calibrate(net, batches)


def block() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Hardswish(),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last((x + self.second(x)).relu())


class TestAvailability:
    @pytest.mark.parametrize("name", ["x86", "fbgemm", "qnnpack"])
    def test_an_engine_that_torch_lacks_is_an_error_with_those_there_are(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engines, "_engines", lambda: ["other"])
        built = {backend.name: backend for backend in engines.build()}
        monkeypatch.setattr(registry, "backends", lambda: {**backends(), **built})
        with pytest.raises(BackendError, match=rf"'{name}' cannot run here: .*engines here: other\. Available"):
            resolve_backend(name)

    def test_dropped_operators_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "_NEEDED", (*engines._NEEDED, "no_such_operator"))
        built = {backend.name: backend for backend in engines.build()}
        monkeypatch.setattr(registry, "backends", lambda: {**backends(), **built})
        with pytest.raises(BackendError, match=r"dropped its classic quantized operators \(no_such_operator\)"):
            prepare(block(), backend="x86")

    def test_fbgemm_says_why_its_weights_have_seven_bits(self) -> None:
        if "fbgemm" not in ENGINES:
            pytest.skip("no fbgemm here")
        net = prepare(block(), backend="fbgemm", mode="ptq")
        assert "the weights have 7 bits" in str(report(net))
        full = prepare(block(), backend="reference", mode="ptq")
        calibrate(full, [torch.randn(2, 3, 8, 8)])
        with pytest.raises(BackendError, match="prepare the model here with backend='fbgemm'"):
            convert(full, backend="fbgemm")

    @pytest.mark.skipif("x86" not in ENGINES, reason="no x86 here")
    def test_x86_without_vnni_has_seven_bits_and_sums_on_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "cpu_has_int8_dot_products", lambda: False)
        x86 = next(backend for backend in engines.build() if backend.name == "x86")
        assert x86.reduced == "weight"
        assert "neither VNNI nor AMX" in x86.explain_ranges()
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        net = prepare(Sum().eval(), QConfig(activation_observer=MinMaxObserver), backend=x86, mode="ptq")
        int8 = convert(calibrate(net, [x]))
        assert int8.second.weight().int_repr().abs().max() <= 63
        assert int8.second.kernel in ("x86 conv2d to uint8, then add+relu", NO_KERNEL)
        assert sqnr(convert(net, backend="reference")(x), int8(x)) >= 30


class TestTheUsersEngine:
    @pytest.mark.parametrize("name", ENGINES)
    def test_the_result_is_the_same_under_any_global_engine(self, name: str, users_engine: str) -> None:
        """Under qnnpack torch's own ReLU6 of a channels_last tensor permutes values (2.14)."""
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        for net in (block(), Sum()):
            before = prepared(net, x)
            expected = convert(before, backend=name)(x)
            for engine in GLOBAL:
                torch.backends.quantized.engine = engine
                int8 = convert(before, backend=name)
                assert torch.equal(int8(x), expected)
                assert torch.equal(copy.deepcopy(int8)(x), expected)
                with torch.inference_mode():
                    assert torch.equal(int8(x), expected)
                assert torch.backends.quantized.engine == engine
            torch.backends.quantized.engine = users_engine

    @pytest.mark.parametrize("name", ENGINES)
    def test_it_is_put_back_after_errors_and_nested_blocks(self, name: str, users_engine: str) -> None:
        with pytest.raises(RuntimeError, match=name), running(name):
            raise RuntimeError(torch.backends.quantized.engine)
        assert torch.backends.quantized.engine == users_engine
        with running(name):
            with running(name):
                pass
            assert torch.backends.quantized.engine == name

    def test_one_that_is_set_in_the_meantime_stays(self, users_engine: str) -> None:
        other = next(engine for engine in GLOBAL if engine != users_engine)
        with running(users_engine):
            torch.backends.quantized.engine = other
        assert torch.backends.quantized.engine == other
        torch.backends.quantized.engine = users_engine

    @pytest.mark.skipif(len(ENGINES) < 2, reason="one engine alone")
    def test_a_block_of_another_engine_waits(self) -> None:
        entered, leave, seen = threading.Event(), threading.Event(), []

        def hold() -> None:
            with running(ENGINES[0]):
                entered.set()
                leave.wait(10)
                seen.append(torch.backends.quantized.engine)

        def other() -> None:
            with running(ENGINES[1]):
                seen.append(torch.backends.quantized.engine)

        threads = [threading.Thread(target=hold), threading.Thread(target=other)]
        threads[0].start()
        assert entered.wait(10)
        with running(ENGINES[0]):  # of the same engine: at once
            threads[1].start()
            threads[1].join(0.2)
            assert not seen
        leave.set()
        for thread in threads:
            thread.join(10)
        assert seen == ENGINES[:2]

    def test_threads_with_models_of_all_engines(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        before = prepared(Sum(), x)
        models = [convert(before, backend=name) for name in ENGINES]
        expected = [model(x) for model in models]
        wrong: list[int] = []

        def run(index: int) -> None:
            for _ in range(30):
                if not torch.equal(models[index](x), expected[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=run, args=(index % len(models),)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    @pytest.mark.parametrize("name", ENGINES)
    def test_torchs_notice_of_deprecation_does_not_reach_the_user(self, name: str) -> None:
        x = torch.randn(2, 3, 8, 8)
        before = prepared(block(), x)
        always = torch.is_warn_always_enabled()
        try:
            torch.set_warn_always(True)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                int8 = convert(before, backend=name)
        finally:
            torch.set_warn_always(always)
        assert int8(x).shape == (2, 4)


def sums_in_float64(layer: QuantizedLayer, x: Tensor, q: QParams, function: Any, **geometry: Any) -> Tensor:
    """What a layer computes on codes, with its bias, exactly."""
    weight = layer.codes.double() * layer.scale.double().view(-1, *[1] * (layer.codes.dim() - 1))
    bias = None if layer.bias is None else layer.bias.double()
    return function((x.double() - q.zero_point) * q.scale, weight, bias, **geometry)


def layer_of(codes: Tensor, scale: Tensor, bias: Tensor | None) -> QuantizedLayer:
    return QuantizedLayer(codes, scale, torch.zeros(len(scale), dtype=torch.int32), bias)


def run_conv(name: str, layer: QuantizedLayer, x: Tensor, q: QParams, out: QParams, **geometry: Any) -> Tensor:
    dims = x.dim() - 2
    given = {"stride": 1, "padding": 0, "dilation": 1, **geometry}
    groups = given.pop("groups", 1)
    lists = {key: [value] * dims for key, value in given.items()}
    onednn = backends()[name].reduced is None and name == "x86" and groups > 100
    pack = engine_kernels.ConvPacking("onednn" if onednn else name, q.scale, **lists, groups=groups)
    end = (out.scale, out.zero_point, False, None)
    return engine_kernels.conv(x, q.scale, q.zero_point, pack(layer), dims, x.shape[1], *end)


def grid(values: Tensor) -> QParams:
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    scale = (high - low) / 255
    return QParams(scale, round(-low / scale), 0, 255, torch.uint8)


def assert_rounded(codes: Tensor, values: Tensor, out: QParams, slack: float = 1e-3) -> None:
    """The codes are those of the values, to within a tie."""
    exact = (values / out.scale + out.zero_point).clamp(0, 255)
    assert float((codes.double() - exact).abs().max()) <= 0.5 + slack


LAYERS = {
    "conv2d": (2, 64, 16, {"padding": 1}),
    "conv2d 1x1": (2, 128, 16, {}),
    "groups": (2, 32, 32, {"groups": 4}),
    "128 groups": (2, 256, 256, {"groups": 128}),
    "depthwise": (2, 64, 64, {"groups": 64, "padding": 1}),
    "depthwise, strided": (2, 128, 128, {"groups": 128, "padding": 1, "stride": 2}),
    "depthwise, 128": (2, 128, 128, {"groups": 128, "padding": 1}),
    "odd": (2, 3, 7, {"stride": 2, "padding": 1, "dilation": 2}),
    "conv1d": (1, 64, 16, {"padding": 2}),
    "conv1d, depthwise": (1, 128, 128, {"groups": 128, "padding": 1}),
    "conv3d": (3, 16, 16, {}),
    "conv3d, depthwise": (3, 128, 128, {"groups": 128, "padding": 1}),
}


class TestLayers:
    @pytest.mark.parametrize("worst", ["largest", "smallest", "random"])
    @pytest.mark.parametrize("kernel", [3, 5])
    @pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
    @pytest.mark.parametrize("name", ENGINES)
    def test_no_convolution_saturates(self, name: str, case: tuple[Any, ...], kernel: int, worst: str) -> None:
        dims, channels, out_channels, geometry = case
        torch.manual_seed(0)
        most = 127 if backends()[name].reduced is None else 63
        shape = (out_channels, channels // geometry.get("groups", 1), *[kernel] * dims)
        x = torch.randint(0, 256, (2, channels, *[11 if dims < 3 else 9] * dims), dtype=torch.uint8)
        codes = torch.randint(-most, most + 1, shape, dtype=torch.int8)
        if worst != "random":
            x.fill_(255 if worst == "largest" else 0)
            codes.fill_(most)[::2] = -most
        q = QParams(0.02, {"largest": 0, "smallest": 255, "random": 37}[worst], 0, 255, torch.uint8)
        layer = layer_of(codes, torch.rand(out_channels) * 0.01 + 0.001, torch.randn(out_channels))
        function = getattr(nn.functional, f"conv{dims}d")
        values = sums_in_float64(layer, x, q, function, **geometry)
        out = grid(values)
        assert_rounded(run_conv(name, layer, x, q, out, **geometry), values, out)

    @pytest.mark.parametrize("worst", [255, 0])
    @pytest.mark.parametrize("name", ENGINES)
    def test_no_linear_layer_saturates(self, name: str, worst: int) -> None:
        torch.manual_seed(0)
        most = 127 if backends()[name].reduced is None else 63
        codes = torch.full((8, 512), most, dtype=torch.int8)
        codes[::2] = -most
        layer = layer_of(codes, torch.rand(8) * 0.01 + 0.001, torch.randn(8))
        q = QParams(0.02, 255 - worst, 0, 255, torch.uint8)
        x = torch.full((3, 5, 512), worst, dtype=torch.uint8)
        values = sums_in_float64(layer, x, q, nn.functional.linear)
        out = grid(values)
        packed = engine_kernels.LinearPacking(name, q.scale)(layer)
        shape, end = list(layer.codes.shape), (out.scale, out.zero_point, False, None)
        found = engine_kernels.linear(x, q.scale, q.zero_point, packed, shape, *end)
        assert_rounded(found, values, out)
        if name != "qnnpack":
            packed = engine_kernels.LinearPacking("fbgemm", q.scale)(layer)
            floats = engine_kernels.linear_to_float(x, q.scale, q.zero_point, packed, shape)
            torch.testing.assert_close(floats.double(), values, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("name", ENGINES)
    def test_channels_that_other_layers_do_not_have(self, name: str) -> None:
        """Negative scales, with the code that has no opposite; channels of nothing, or next to nothing, but a bias."""
        torch.manual_seed(0)
        codes = torch.randint(-63, 64, (8, 4, 3, 3), dtype=torch.int8)
        codes[0, 0, 0, 0] = -128
        codes[3], codes[4] = 0, 0
        scale = torch.tensor([-0.01, 0.01, -0.02, 1.0, 1.0, 1e-15, 1e-9, -1e-15])
        bias = torch.tensor([0.3, -0.2, 0.1, 0.7123, 0.0, 0.5123, -0.25, 0.4])
        layer = layer_of(codes, scale, bias)
        q = QParams(0.02, 100, 0, 255, torch.uint8)
        x = torch.randint(0, 256, (2, 4, 8, 8), dtype=torch.uint8)
        values = sums_in_float64(layer, x, q, nn.functional.conv2d)
        out = grid(values)
        assert_rounded(run_conv(name, layer, x, q, out), values, out, slack=0.01)

    def test_a_bias_that_qnnpack_would_round_too_coarsely_keeps_the_layer_in_float(self) -> None:
        if "qnnpack" not in ENGINES:
            pytest.skip("no qnnpack here")
        net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Hardtanh(0.0, 0.01), nn.Conv2d(1, 1, 1))
        with torch.no_grad():
            net[0].weight.fill_(1.0)
            net[0].bias.fill_(0.004)
        x = torch.randn(1, 1, 16, 16)
        before = prepared(net, x, backend="reference")
        int8 = convert(before, backend="qnnpack")
        assert int8[0].kernel == NO_KERNEL
        assert torch.equal(int8(x), convert(before, backend="reference")(x))

    @pytest.mark.parametrize("shape", [(3, 6, 6), (2, 3, 6, 6), (0, 3, 6, 6)], ids=str)
    @pytest.mark.parametrize("name", ENGINES)
    def test_shapes_with_and_without_a_batch(self, name: str, shape: tuple[int, ...]) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, 2, output_padding=1))
        before = prepared(net, torch.randn(2, 3, 6, 6))
        x = torch.randn(shape)
        found, expected = convert(before, backend=name)(x), convert(before, backend="reference")(x)
        assert found.shape == expected.shape
        assert not x.numel() or sqnr(expected, found) >= 40


class TestSums:
    @pytest.mark.parametrize("operation", ["add", "add_relu", "mul"])
    @pytest.mark.parametrize("name", ENGINES)
    def test_sums_and_products_are_rounded_once(self, name: str, operation: str) -> None:
        torch.manual_seed(0)
        layouts = [
            ((2, 8, 5, 7), (2, 8, 5, 7)),
            ((2, 8, 5, 7), (1, 8, 1, 1)),
            ((3, 5), (3, 5)),
            ((), ()),
            ((4,), ()),
            ((0, 4), (0, 4)),
        ]
        for left, right in layouts:
            for out_scale in (0.05, 0.007):
                x, y = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in (left, right))
                if x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                a, b = (x.double() - 3) * 0.02, (y.double() - 120) * 0.03
                values = a * b if operation == "mul" else (a + b).relu() if operation == "add_relu" else a + b
                found = engine_kernels.binary(operation, name, x, 0.02, 3, y, 0.03, 120, out_scale, 100, (10, 200))
                assert found.shape == values.shape
                exact = (values / out_scale + 100).clamp(10, 200)
                # qnnpack adds in fixed point.
                assert not found.numel() or float((found.double() - exact).abs().max()) <= 0.51

    @pytest.mark.skipif("x86" not in ENGINES or backends()["x86"].reduced is not None, reason="no sums in kernels here")
    @pytest.mark.parametrize("shape", [(2, 8, 6, 6), (1, 8, 1, 1), (3, 1, 8, 6, 6)], ids=str)
    @pytest.mark.parametrize("relu", [False, True])
    def test_a_residual_is_taken_in_whatever_its_shape_is(self, relu: bool, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        codes = torch.randint(-127, 128, (8, 4, 3, 3), dtype=torch.int8)
        layer = layer_of(codes, torch.rand(8) * 0.01 + 0.001, torch.randn(8))
        q = QParams(0.02, 37, 0, 255, torch.uint8)
        x, residual = (
            torch.randint(0, 256, s, dtype=torch.uint8)
            for s in ((2, 4, 8, 8) if len(shape) < 5 else (1, 4, 8, 8), shape)
        )
        kept = residual.clone()
        values = sums_in_float64(layer, x, q, nn.functional.conv2d) + (residual.double() - 90) * 0.05
        values = values.relu() if relu else values
        out = replace(grid(values), zero_point=20) if relu else grid(values)
        packed = engine_kernels.ConvPacking("onednn", q.scale, [1, 1], [0, 0], [1, 1], 1)(layer)
        found = engine_kernels.conv2d_add(
            x, q.scale, q.zero_point, packed, [1, 1], [0, 0], [1, 1], 1, [8, 4, 3, 3], residual, 0.05, 90,
            out.scale, out.zero_point, relu, None,
        )  # fmt: skip
        assert_rounded(found, values, out)
        assert torch.equal(residual, kept)


class TestStagesOfSums:
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize("residual_scale", [0.02, 0.04, 0.05])
    def test_a_sum_is_one_code_off_at_most(self, residual_scale: float, relu: bool) -> None:
        torch.manual_seed(0)
        out = QParams(0.05, 0 if relu else 110, 0, 255, torch.uint8)
        residual = QParams(residual_scale, 0 if relu else 128, 0, 255, torch.uint8)
        stage = engines.stage_of_sum(residual, out, (0, 255))
        assert stage is not None
        y = (torch.rand(100_000) - 0.5) * 60
        codes = torch.randint(0, 256, y.shape)
        r = (codes - residual.zero_point) * residual.scale
        rounded = (QUANTIZE(y, *stage.args()).double() - stage.zero_point) * stage.scale
        expected, found = (QUANTIZE((v + r).float(), *out.args()).int() for v in (y, rounded))
        assert int((expected - found).abs().max()) == 1

    def test_a_residual_too_coarse_has_no_stage(self) -> None:
        fine, coarse = (QParams(scale, 128, 0, 255, torch.uint8) for scale in (0.01, 0.1))
        assert engines.stage_of_sum(coarse, fine, (0, 255)) is None


# A sixth of the cases each time, all with the slow ones.
EVERY = [pytest.param(c, id=str(c), marks=[pytest.mark.slow] if i % 6 else []) for i, c in enumerate(CASES)]


@torch.no_grad()
@pytest.mark.parametrize("case", EVERY)
def test_every_call_says_what_the_reference_says(case: Case) -> None:
    """To within two codes: a tie in front of a call may be one, a layer that is rounded before a sum another."""
    torch.manual_seed(0)
    net = case.build().eval()
    prepare(net, QConfig(activation_observer=MinMaxObserver), backend="fbgemm", mode="ptq")
    calibrate(net, [case.input()])
    reference = convert(net, backend="reference")
    for name in ENGINES:
        int8 = convert(net, backend=name)
        families = (name, NO_KERNEL, "onednn") if name == "x86" else (name, NO_KERNEL)
        assert all((row.kernel or row.reason).startswith(families) for row in report(int8).layers)
        for batch in (2, 1):
            x = case.input(batch)
            (y, z), (found, behind) = reference(x, expose=True), int8(x, expose=True)
            assert found.shape == y.shape
            values = y.unique().double()
            step = float(values.diff().min()) if len(values) > 1 else 1.0
            assert float((found - y).abs().max()) <= 2.01 * step
            assert sqnr(z, behind) >= 30
