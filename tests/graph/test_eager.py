"""Models written for PyTorch's eager-mode quantization: they go through as they are, or are refused by name."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.quantizable
import torch.ao.nn.quantized as nnq
import torch.ao.quantization as ao
import torchvision
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.ops.misc import Conv2dNormActivation

from qlightning import QConfig, QuantizationError, calibrate, convert, prepare, report
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph.report import Report
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
REQUIRED_DB = 30.0
QUICK = {"resnet18": "qat", "mobilenet_v2": "ptq", "shufflenet_v2_x0_5": "qat"}  # the other mode with the slow ones
SLOW = (
    "resnet50",
    "resnext101_32x8d",
    "mobilenet_v3_large",
    "googlenet",
    "inception_v3",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
)


@pytest.fixture(autouse=True)
def _no_word_of_torch_ao() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.ao.quantization is deprecated")
        warnings.filterwarnings("ignore", message=".*reduce_range will be deprecated")
        yield


def build(name: str, size: int) -> tuple[nn.Module, list[Tensor]]:
    """A quantizable net of torchvision's with warm BatchNorm statistics, and three batches."""
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    net = getattr(torchvision.models.quantization, name)(weights=None, quantize=False, **options)
    batches = [torch.randn(2, 3, size, size) for _ in range(3)]
    warm_up(net, batches)
    return net, batches


@torch.no_grad()
def warm_up(net: nn.Module, batches: list[Tensor]) -> None:
    net.train()
    for _ in range(4):
        for x in batches:
            net(x)
    net.eval()


def observed(net: nn.Module, batches: list[Tensor], mode: Any, **settings: Any) -> nn.Module:
    """The net after two training steps or a calibration."""
    prepare(net, mode=mode, **settings)
    if mode == "ptq":
        return calibrate(net, batches[:2])
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for x in batches[:2]:
        result = net(x)
        outputs = [result] if isinstance(result, Tensor) else [y for y in result if y is not None]
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(y, torch.arange(len(x)) % 2) for y in outputs).backward()
        optimizer.step()
    return net.eval()


def grids(net: nn.Module) -> list[str]:
    return [fq.name for _, fq in fake_quantizers(net) if not isinstance(fq, WeightFakeQuantize)]


def assert_int8(found: Report) -> None:
    used = [row for row in found.float_layers if row.reason != "called in training only"]  # auxiliary classifiers
    assert not used
    assert found.int8_layers


@pytest.mark.parametrize(
    "name, mode",
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] if QUICK.get(name) != mode else [])
        for name in (*QUICK, *SLOW)
        for mode in ("qat", "ptq")
    ],
)
def test_torchvisions_quantizable_nets_as_they_are(name: str, mode: str) -> None:
    net, batches = build(name, 64 if name in QUICK else 299 if name == "inception_v3" else 224)
    float_keys, float_types = set(net.state_dict()), {n: type(m) for n, m in net.named_modules()}
    prepared = observed(net, batches, mode)
    assert prepared is net
    assert {n for n in net.state_dict() if "fake_quant" not in n} == float_keys
    int8 = convert(net)
    assert_int8(report(int8))
    with torch.no_grad():
        assert sqnr(net(batches[2]), int8(batches[2])) >= REQUIRED_DB
        assert torch.equal(copy.deepcopy(int8)(batches[2]), int8(batches[2]))
    for path, kind in float_types.items():
        if kind in (nnq.FloatFunctional, ao.QuantStub, ao.DeQuantStub):
            assert type(int8.get_submodule(path)) is kind
    with pytest.raises(QuantizationError, match="Save the state dict"):
        pickle.dumps(int8)


class Block(nn.Module):
    """What eager mode asks for: stubs, a FloatFunctional, fusible chains."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.skip = nnq.FloatFunctional()
        self.fc, self.relu2, self.head = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        x = self.skip.add_relu(x, self.bn2(self.conv2(x)))
        return self.dequant(self.head(self.relu2(self.fc(x.mean((2, 3))))))

    def fuse(self, is_qat: bool) -> None:
        chains = [["conv1", "bn1", "relu1"], ["conv2", "bn2"], ["fc", "relu2"]]
        fuse: Callable[..., Any] = ao.fuse_modules_qat if is_qat else ao.fuse_modules
        fuse(self.train(is_qat), chains, inplace=True)


def images() -> list[Tensor]:
    return [torch.randn(4, 3, 8, 8) for _ in range(3)]


@pytest.mark.parametrize("mode", ["qat", "ptq"])
@pytest.mark.parametrize("is_qat", [False, True])
def test_fused_modules_have_the_grids_of_the_parts(is_qat: bool, mode: str) -> None:
    net, batches = Block(), images()
    warm_up(net, batches)
    plain = observed(copy.deepcopy(net), batches, mode)
    with torch.no_grad():
        expected = net(batches[2])
    net.fuse(is_qat)
    net.qconfig = ao.get_default_qat_qconfig("x86")  # what eager mode leaves on models says nothing here
    float_keys = set(net.state_dict())
    fused = observed(net.eval(), batches, mode)
    assert {key for key in fused.state_dict() if "fake_quant" not in key} == float_keys
    assert len(grids(fused)) == len(grids(plain)) == 5
    int8 = convert(fused)
    assert_int8(report(int8))
    with torch.no_grad():
        assert sqnr(fused(batches[2]), int8(batches[2])) >= REQUIRED_DB
        if mode == "ptq":  # training moves the weights
            assert sqnr(expected, fused(batches[2])) > 20


@pytest.mark.slow
@pytest.mark.parametrize("is_qat", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "mobilenet_v3_large"])
def test_fuse_model_changes_no_grid(name: str, is_qat: bool) -> None:
    net, batches = build(name, 64)
    count = len(grids(prepare(copy.deepcopy(net))))
    net.train(is_qat)
    net.fuse_model(is_qat=is_qat)  # type: ignore[operator]
    fused = observed(net.eval(), batches, "ptq")
    assert len(grids(fused)) == count
    int8 = convert(fused)
    assert_int8(report(int8))
    with torch.no_grad():
        assert sqnr(fused(batches[2]), int8(batches[2])) >= REQUIRED_DB


def test_a_quant_wrapper() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    net, batches = ao.QuantWrapper(inner), images()
    warm_up(net, batches)
    int8 = convert(observed(net, batches, "ptq"))
    assert len(grids(net)) == 2
    assert_int8(report(int8))
    with torch.no_grad():
        assert sqnr(net(batches[2]), int8(batches[2])) >= REQUIRED_DB


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module, features: int):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), inner, nn.Linear(features, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        attends = isinstance(self.inner, nn.MultiheadAttention)
        return self.last(self.inner(x, x, x)[0] if attends else self.inner(x)[0])


@pytest.mark.parametrize(
    "build_inner, features, layers",
    [
        (lambda: torch.ao.nn.quantizable.LSTM(16, 8, 2, batch_first=True), 8, 6),
        (lambda: torch.ao.nn.quantizable.MultiheadAttention(16, 2, batch_first=True), 16, 6),
    ],
    ids=["LSTM", "MultiheadAttention"],
)
def test_the_linear_layers_of_quantizable_modules_are_int8_between_float_calls(
    build_inner: Callable[[], nn.Module], features: int, layers: int
) -> None:
    net = Recurrent(build_inner(), features).eval()
    batches = [torch.randn(2, 5, 16) for _ in range(3)]
    with torch.no_grad():
        expected = net(batches[2])
        with pytest.warns(UserWarning, match=r"inner \(\w+\) cannot be traced"):
            prepared = observed(net, batches, "ptq")
        int8 = convert(prepared)
        assert_int8(report(int8))
        assert len(report(int8).int8_layers) == layers
        assert any("inner" in note for note in report(int8).notes)
        assert sqnr(prepared(batches[2]), int8(batches[2])) >= REQUIRED_DB
        assert sqnr(expected, int8(batches[2])) > 20


def prepared_by_ao() -> nn.Module:
    net = Block()
    net.fuse(False)
    net.qconfig = ao.get_default_qconfig("x86")
    return ao.prepare(net)


def prepared_for_qat_by_ao() -> nn.Module:
    net = Block()
    net.quant = nn.Identity()
    net.fuse(True)
    net.qconfig = ao.get_default_qat_qconfig("x86")
    return ao.prepare_qat(net.train())


def quantized_by_ao() -> nn.Module:
    net = prepared_by_ao()
    net(images()[0])
    return ao.convert(net)


def dynamic() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 3)))
    net[1] = ao.quantize_dynamic(net[1])
    return net


def observed_stub() -> nn.Module:
    net = nn.Sequential(ao.QuantStub(), nn.Linear(8, 8), ao.DeQuantStub())
    net[0].qconfig = ao.get_default_qconfig("x86")
    return ao.prepare(net)


@pytest.mark.parametrize(
    "build_net, layer, message",
    [
        (prepared_for_qat_by_ao, "conv1", r"intrinsic\.qat\..*\.ConvBnReLU2d.* before torch.ao's prepare_qat"),
        (prepared_by_ao, "quant", r"\(QuantStub\) is observed by a torch.ao.quantization.*Observer"),
        (quantized_by_ao, "quant", r"is a torch.ao.nn.quantized.*Quantize, which is quantized already"),
        (dynamic, "1.0", r"is a torch.ao.nn.quantized.dynamic.*Linear, which is quantized already"),
        (observed_stub, "0", r"\(QuantStub\) is observed by a torch.ao.quantization"),
    ],
)
def test_what_torch_ao_has_quantized_is_refused_by_name(
    build_net: Callable[[], nn.Module], layer: str, message: str
) -> None:
    net = build_net()
    before = {name: type(module) for name, module in net.named_modules()}
    with pytest.raises(ConfigError, match=rf"^{layer} .*{message}") as refusal:
        prepare(net)
    assert f"exclude=({layer!r},)" in str(refusal.value)
    assert {name: type(module) for name, module in net.named_modules()} == before


@torch.no_grad()
def test_what_torch_ao_has_quantized_stays_as_it_is_where_it_is_excluded() -> None:
    net, x = dynamic().eval(), torch.randn(4, 8)
    prepared = calibrate(prepare(net, mode="ptq", exclude=["1"]), [x])
    int8 = convert(prepared)
    assert [row.name for row in report(int8).int8_layers] == ["0"]
    assert type(int8[1][0]) is type(net[1][0])
    # The dynamic layer takes the range of its input anew, where a code's difference moves it by a step of 255.
    assert sqnr(prepared(x), int8(x)) >= REQUIRED_DB


class Clipped(nn.Module):
    """The first two blocks of MobileNetV2, with what the ReLU6 of the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Conv2dNormActivation(3, 8, activation_layer=nn.ReLU6)
        self.block = InvertedResidual(8, 8, 1, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.stem(x)
        return y, self.block(y)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("observer", [MinMaxObserver, MovingAverageObserver, HistogramObserver])
def test_relu6_of_mobilenet_stays(observer: Any, backend: str) -> None:
    net, batches = Clipped(), images()
    nn.init.constant_(net.stem[1].weight, 20.0)  # most of what passes would be larger than 6
    warm_up(net, batches)
    clips = {name for name, module in net.named_modules() if type(module) is nn.ReLU6}
    assert len(clips) == 3
    y, z = net(batches[2])
    prepared = observed(net, batches, "ptq", backend=backend, qconfig=QConfig(activation_observer=observer))
    int8 = convert(prepared)
    for model in (prepared, int8):
        found_y, found_z = model(batches[2])
        assert found_y.max() <= 6
        assert (found_y == found_y.max()).float().mean() > 0.25  # clipped, not only small
        assert sqnr(y, found_y) > 20
        assert sqnr(z, found_z) > 20
        assert {name for name, module in model.named_modules() if type(module) is nn.ReLU6} == clips
    assert sqnr(prepared(batches[2])[1], int8(batches[2])[1]) >= REQUIRED_DB
    # One rounding, behind the clip: the grid ends at 6 and is not that of what went in.
    (grid,) = (fq for _, fq in fake_quantizers(prepared) if fq.name == "stem.0")
    assert float(grid.scale) * 255 <= 6 + float(grid.scale) / 2
