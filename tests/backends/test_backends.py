"""Backends: which there are, which one is picked, and that none of them saturates."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlightning import QConfig, QScheme, calibrate, convert, prepare, report
from qlightning.affine import sqnr
from qlightning.backends import available, backends, registry, resolve_backend
from qlightning.backends.base import cpu_features
from qlightning.errors import BackendError, ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.observers import MinMaxObserver

BACKENDS = available()
KERNELS = [name for name in BACKENDS if name in ("onednn", "openvino", "onnxruntime")]


@pytest.fixture
def no_int8_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that adds int8 products up in 16 bits."""
    found = {name: replace(b, reduced="weight" if name == "onednn" else None) for name, b in backends().items()}
    monkeypatch.setattr(registry, "backends", lambda: found)


@pytest.fixture
def int8_dot_products(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: replace(b, reduced=None) for name, b in backends().items()}
    monkeypatch.setattr(registry, "backends", lambda: found)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {n: replace(b, unavailable="no kernels." if n == "onednn" else "") for n, b in backends().items()}
    monkeypatch.setattr(registry, "backends", lambda: found)


class TestChoice:
    def test_reference_is_everywhere(self) -> None:
        assert "reference" in available()
        assert resolve_backend("reference").name == "reference"

    def test_a_value_is_itself(self) -> None:
        backend = resolve_backend("reference")
        assert resolve_backend(backend) is backend

    @pytest.mark.parametrize("name", BACKENDS)
    def test_a_copy_is_the_same_backend(self, name: str) -> None:
        assert copy.deepcopy(resolve_backend(name)) == resolve_backend(name)

    def test_auto_picks_the_kernels(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if "onednn" in available() else "ignore")
            assert resolve_backend("auto").name == BACKENDS[0]

    @pytest.mark.usefixtures("no_kernels")
    def test_auto_without_kernels_is_the_reference_with_a_warning(self) -> None:
        others = ", ".join(name for name in available() if name != "reference")
        with pytest.warns(UserWarning, match=rf"'reference'.*{others}"):
            chosen = resolve_backend("auto")
        assert chosen.name == "reference"
        assert "chosen by auto: onednn cannot run here" in chosen.explain_choice()
        assert "no kernels." in chosen.explain_choice()

    @pytest.mark.parametrize("lacks", ["", "it needs openvino: pip install 'qlightning[openvino]'."])
    def test_the_report_says_why_auto_has_chosen(self, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {**backends(), "onednn": replace(backends()["onednn"], unavailable="")}
        found["openvino"] = replace(found["openvino"], unavailable=lacks)
        monkeypatch.setattr(registry, "backends", lambda: found)
        told = str(report(prepare(nn.Sequential(nn.Linear(4, 4)), backend="auto", mode="ptq")))
        assert f"backend onednn, chosen by auto: this CPU ({cpu_features()}) runs its int8 kernels" in told
        assert (lacks or "openvino, faster on most nets, is installed here.") in told

    @pytest.mark.parametrize("name", BACKENDS)
    def test_what_was_asked_for_needs_no_reason(self, name: str) -> None:
        net = prepare(nn.Sequential(nn.Linear(4, 4)), backend=name, mode="ptq")
        assert report(net).choice == ""
        assert "auto" not in str(report(net))

    def test_the_reason_does_not_make_another_backend(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = resolve_backend("auto")
        assert chosen == resolve_backend(chosen.name)

    @pytest.mark.usefixtures("no_kernels")
    def test_missing_kernels_say_why_and_what_there_is(self) -> None:
        with pytest.raises(BackendError, match=r"'onednn'.*no kernels.*Available.*reference"):
            resolve_backend("onednn")

    def test_unknown_names_list_what_there_is(self) -> None:
        with pytest.raises(ConfigError, match=r"'refrence'.*Did you mean 'reference'.*Available.*auto, .*reference"):
            resolve_backend("refrence")


class TestSchemes:
    @pytest.mark.usefixtures("no_int8_dot_products")
    def test_weights_get_one_bit_less_where_kernels_would_saturate(self) -> None:
        backend = registry.backends()["onednn"]
        adapted = backend.adapt(QConfig(overrides={"a": QConfig(), "b": None}))
        assert adapted.weight.bits == 7
        assert adapted.activation.bits == 8
        assert adapted.overrides["a"].weight.bits == 7
        assert adapted.overrides["b"] is None
        assert backend.adapt(adapted) == adapted
        assert not backend.saturates(adapted.activation, adapted.weight)
        assert backend.saturates(QScheme(signed=False), QScheme(symmetric=True))
        assert not backend.saturates(QScheme(signed=False, bits=7), QScheme(symmetric=True))

    @pytest.mark.usefixtures("no_int8_dot_products")
    def test_the_report_says_why_a_bit_is_missing(self) -> None:  # C55
        net = prepare(nn.Sequential(nn.Linear(4, 4)), backend="onednn", mode="ptq")
        assert "neither VNNI nor AMX" in str(report(net))
        assert "the weights have 7 bits" in str(report(net))
        net = prepare(nn.Sequential(nn.Linear(4, 4)), backend="reference", mode="ptq")
        assert "VNNI" not in str(report(net))

    @pytest.mark.usefixtures("int8_dot_products")
    def test_all_bits_are_used_where_nothing_saturates(self) -> None:
        assert registry.backends()["onednn"].adapt(QConfig()) == QConfig()

    def test_the_reference_takes_all(self) -> None:
        qconfig = QConfig(activation=QScheme(axis=1), weight=QScheme(signed=False))
        assert resolve_backend("reference").adapt(qconfig) == qconfig

    @pytest.mark.usefixtures("no_int8_dot_products")
    def test_a_full_range_model_is_not_converted_to_kernels_that_saturate(self) -> None:
        if "onednn" not in available():
            pytest.skip("no onednn here")
        for net, qconfig in (
            (nn.Sequential(nn.Linear(4, 4)), None),
            (
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                QConfig(weight=QScheme(bits=7, symmetric=True), overrides={"0": QConfig()}),
            ),
        ):
            prepare(net, qconfig, backend="reference", mode="ptq")
            calibrate(net, [torch.randn(2, 4)])
            with pytest.raises(BackendError, match="would saturate"):
                convert(net, backend="onednn")
            assert convert(net)(torch.randn(2, 4)).shape == (2, 4)


def of_input(prepared: nn.Module) -> nn.Module:
    """The fake-quantizer of what goes in: a symmetric grid does not have the largest value itself."""
    return next(fq for _, fq in fake_quantizers(prepared) if not isinstance(fq, WeightFakeQuantize))


def worst_case(layer: nn.Module, x: Tensor, backend: str) -> tuple[nn.Module, nn.Module]:
    """A prepared layer of which every product is as large as its grids allow, and what it becomes."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[::2] = -1.0
    net = nn.Sequential(layer)
    prepare(net, QConfig(activation_observer=MinMaxObserver), backend=backend, mode="ptq")
    calibrate(net, [torch.zeros_like(x), x])
    return net, convert(net)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(512, 8), (3, 512)),
        (nn.Conv2d(64, 16, 3, padding=1), (2, 64, 8, 8)),
        (nn.Conv2d(64, 64, 3, groups=64), (2, 64, 8, 8)),
        (nn.Conv2d(128, 128, 3, groups=128), (1, 128, 8, 8)),
        (nn.Conv2d(32, 32, 3, groups=4), (1, 32, 8, 8)),
        (nn.Conv2d(128, 16, 1), (2, 128, 4, 4)),
        (nn.Conv1d(64, 16, 5), (2, 64, 12)),
        (nn.Conv3d(16, 16, 3), (1, 16, 4, 4, 4)),
        (nn.ConvTranspose2d(32, 16, 3, stride=2), (1, 32, 4, 4)),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_largest_products_are_exact(layer: nn.Module, shape: tuple[int, ...], sign: float, backend: str) -> None:
    x = torch.ones(shape) * sign
    net, int8 = worst_case(copy.deepcopy(layer), x, backend)
    x = x * 0.999  # the end itself lies between two codes of a symmetric grid
    weight = int8[0].weight().int_repr()
    assert weight.abs().max() == net[0].weight_fake_quant.scheme.quant_max
    rounded = of_input(net)(x)
    expected = net[0].double()
    scale = expected.weight_fake_quant.scale.double()
    reference = nn.Module.__call__(expected, rounded.double())
    torch.testing.assert_close(int8(x).double(), reference, rtol=1e-5, atol=float(scale.max()) * 1e-2)


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.SiLU(), nn.Identity()], ids=str)
def test_activations_behind_1d_and_3d_convolutions(act: nn.Module, layer: Any) -> None:
    """The kernels take few of them (torch 2.14), and say so only when they run."""
    torch.manual_seed(0)
    dims = int(layer.__name__[-2])
    x = torch.randn(2, 4, *[6] * dims)
    prepared = prepare(nn.Sequential(layer(4, 8, 3), act, getattr(nn, f"Conv{dims}d")(8, 2, 3)).eval(), mode="ptq")
    calibrate(prepared, [x])
    expected, found = convert(prepared, backend="reference")(x), convert(prepared)(x)
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("backend", KERNELS)
@torch.no_grad()
def test_a_chain_of_worst_cases_is_exact(backend: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32), nn.ReLU(), nn.Conv2d(32, 4, 1)
    )
    for layer in (net[0], net[2], net[4]):
        layer.weight.fill_(0.5)
        layer.bias.zero_()
    x = torch.ones(1, 32, 8, 8)
    exact = copy.deepcopy(net).double()
    prepare(net, QConfig(activation_observer=MinMaxObserver), backend=backend, mode="ptq")
    calibrate(net, [x])
    expected = exact(of_input(net)(x).double()).float()
    torch.testing.assert_close(convert(net)(x), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_int8_model_copies_saves_and_loads(backend: str) -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(144, 3))
        prepare(net, backend=backend, mode="ptq")
        return convert(calibrate(net, [torch.randn(2, 3, 8, 8)]))

    torch.manual_seed(1)
    int8 = build()
    x = torch.randn(2, 3, 8, 8)
    assert all(not tensor.requires_grad for tensor in int8.state_dict().values())
    assert int8.state_dict()["0.codes"].dtype == torch.int8
    other = build()
    assert not torch.equal(other(x), int8(x))
    assert torch.equal(copy.deepcopy(int8)(x), int8(x))
    assert str(report(int8)) == str(report(copy.deepcopy(int8)))
    changed = copy.deepcopy(int8)
    changed[0].codes.zero_()
    changed[0].repack()
    assert not torch.equal(changed(x), int8(x))


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("layer", "shape", "wrong"),
    [
        (nn.Linear(8, 8), (4, 8), [(4, 7), (4, 16), (4, 0), (7,)]),
        (nn.Conv2d(8, 8, 3), (2, 8, 6, 6), [(2, 7, 6, 6), (2, 16, 6, 6), (4, 6, 6)]),
        (nn.Conv2d(8, 8, 3, groups=4), (2, 8, 6, 6), [(2, 4, 6, 6), (2, 16, 6, 6)]),
        (nn.ConvTranspose2d(8, 8, 3), (2, 8, 6, 6), [(2, 7, 6, 6), (2, 16, 6, 6)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_inputs_of_a_wrong_width_are_refused(
    layer: nn.Module, shape: tuple[int, ...], wrong: list[tuple[int, ...]], backend: str
) -> None:
    net = prepare(nn.Sequential(copy.deepcopy(layer), nn.ReLU()).eval(), mode="ptq", backend=backend)
    int8 = convert(calibrate(net, [torch.randn(shape)]))
    int8(torch.randn(shape))
    kernels = [row.kernel for row in report(int8).layers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the backend is not at fault
        for other in wrong:
            with pytest.raises(RuntimeError):
                int8(torch.randn(other))
    assert [row.kernel for row in report(int8).layers] == kernels


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3), nn.Linear(8, 8)], ids=["conv", "linear"])
def test_channels_whose_bias_exceeds_32_bits_in_steps_of_their_sums(
    layer: nn.Module, factor: float, backend: str
) -> None:
    """ONNX Runtime would cut such a bias off."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer)
    assert isinstance(layer.weight, Tensor)
    assert isinstance(layer.bias, Tensor)
    layer.weight[:2] *= factor
    layer.bias[:2] = torch.tensor([0.5, -0.5])
    is_linear = isinstance(layer, nn.Linear)
    net = nn.Sequential(layer, nn.Hardtanh(-1, 1), nn.Linear(8, 4) if is_linear else nn.Conv2d(8, 4, 1))
    x = torch.randn((16, 8) if is_linear else (2, 8, 6, 6))
    calibrate(prepare(net.eval(), mode="ptq", backend=backend), [x])
    prepared, reference, found = net(x), convert(net, backend="reference")(x), convert(net)(x)
    torch.testing.assert_close(reference, prepared)
    assert sqnr(reference, found) > 50
