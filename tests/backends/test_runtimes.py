"""The backends that are runtimes of others: the answers of the reference, in the same process, for any call."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qlightning
from qlightning import PostTrainingQuantization, QConfig, QScheme, QuantizationAwareTraining, report
from qlightning.backends import available, onnxruntime, openvino, registry
from qlightning.errors import BackendError
from tests.callbacks.nets import Net, loader, samples, task
from tests.export.nets import Encoder, trained

RUNTIMES = {"openvino": openvino, "onnxruntime": onnxruntime}


@pytest.fixture(params=list(RUNTIMES))
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name not in available():
        pytest.skip(f"{name}: {registry.backends()[name].unavailable}")
    return name


@pytest.fixture(scope="module")
def prepared() -> nn.Module:
    net = qlightning.prepare(trained(), mode="ptq")
    return qlightning.calibrate(net, [samples(32, seed=100 + i)[0] for i in range(4)])


@pytest.fixture
def int8(prepared: nn.Module, backend: str) -> Any:
    """The small net on a backend, not called yet."""
    return qlightning.convert(prepared, backend=backend)


@pytest.fixture
def reference(prepared: nn.Module) -> Any:
    return qlightning.convert(prepared, backend="reference")


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """A graph that a runtime does not take is run by torch with a warning: nowhere but where a test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs on 'reference'")
        yield


def both(net: nn.Module, batches: list[Any], backend: str, qconfig: QConfig | None = None) -> tuple[Any, Any]:
    """The int8 forms of one net for the reference and for a backend."""
    qlightning.prepare(net.eval(), qconfig, mode="ptq", backend=backend)
    qlightning.calibrate(net, batches)
    return qlightning.convert(net, backend="reference"), qlightning.convert(net)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Values may round to the neighbouring code where float sums end at a tie; of an 8-bit grid that is one step."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    step = (expected.max() - expected.min()) / 255
    assert ((found - expected).abs() <= 1.5 * step).all()


def in_runtime(int8: nn.Module, backend: str) -> bool:
    """Whether the runtime computes all layers, on integers or, where it has no such kernel, in float."""
    texts = [row.kernel or row.reason for row in report(int8).layers]
    return all(f"{backend} " in text and "in torch" not in text for text in texts)


class Around(nn.Module):
    """A function of images between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.function, self.after = nn.Conv2d(3, 8, 3, padding=1), function, nn.LazyConv2d(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


IN_RUNTIME: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "sum with itself": lambda x: x + F.relu(x),
    "product": lambda x: x * torch.sigmoid(x),
    "squeeze and excitation": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "maximum of an image": lambda x: x.amax((2, 3), keepdim=True),
    "minimum of an image": lambda x: x.amin((2, 3), keepdim=True),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "maximum of channels": lambda x: x - x.amax(1, keepdim=True),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d, rounded up": lambda x: F.max_pool2d(x, 3, 2, 0, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 4),
    "cat": lambda x: torch.cat([x, F.relu(x)], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "channel shuffle": lambda x: x.reshape(2, 2, 4, 8, 8).transpose(1, 2).reshape(2, 8, 8, 8),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad by reflection": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "pad by replication": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate to a size": lambda x: F.interpolate(x, size=(11, 13)),
    "interpolate, bilinear": lambda x: F.interpolate(x, size=(11, 13), mode="bilinear"),
    "interpolate, corners aligned": lambda x: F.interpolate(x, size=(11, 13), mode="bilinear", align_corners=True),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "slices": lambda x: x[:, ::2, 1:-1],
    "select": lambda x: x[:, :, 0][:, :, None],
    "flip": lambda x: x.flip(3),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "index": lambda x: x[:, [0, 2, 1]],
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "in place": lambda x: x.add_(1).relu_(),
    "numbers": lambda x: (x * 2 + 1) / 3 - 0.5,
    "power": lambda x: x**2,
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "group_norm": lambda x: F.group_norm(x, 2),
    "variance": lambda x: x / (x.var(1, keepdim=True) + 1).sqrt(),
    "cumsum": lambda x: x.cumsum(1),
    "matmul": lambda x: x @ x.transpose(2, 3),
}


@pytest.mark.parametrize("name", IN_RUNTIME)
@torch.no_grad()
def test_what_runs_in_the_runtime_gives_the_answers_of_the_reference(name: str, backend: str) -> None:
    torch.manual_seed(0)
    net = Around(IN_RUNTIME[name])
    net(torch.randn(2, 3, 8, 8))
    reference, int8 = both(net, [torch.randn(2, 3, 8, 8) for _ in range(3)], backend)
    x = torch.randn(2, 3, 8, 8)
    assert_close(int8(x), reference(x))
    assert in_runtime(int8, backend)


class Wrapped(nn.Module):
    """A layer between two linear ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(8, 16), layer, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)), (2, 3, 8)),
    (nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 1)), (2, 3, 6, 6, 6)),
    (nn.Sequential(nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2), nn.Conv2d(8, 8, 3, groups=8)), (2, 8, 8, 8)),
    (nn.Sequential(nn.ConvTranspose1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)), (2, 3, 8)),
    (nn.Sequential(nn.ConvTranspose2d(3, 8, 3, 2, 1, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), (2, 3, 8, 8)),
    (nn.Sequential(nn.ConvTranspose2d(4, 8, 3, 2, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1)), (2, 4, 8, 8)),
    (nn.Sequential(nn.ConvTranspose3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 1)), (2, 3, 6, 6, 6)),
    (Wrapped(nn.ReLU()), (2, 8)),
    (Wrapped(nn.GELU()), (2, 5, 8)),
    (Wrapped(nn.LayerNorm(16)), (2, 5, 8)),
    (Wrapped(nn.BatchNorm1d(16)), (6, 8)),
    (nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)), (2, 5, 8)),
]


@pytest.mark.parametrize("layer, shape", LAYERS, ids=[str(i) for i in range(len(LAYERS))])
@torch.no_grad()
def test_layers_give_the_answers_of_the_reference(layer: nn.Module, shape: tuple[int, ...], backend: str) -> None:
    torch.manual_seed(0)
    reference, int8 = both(copy.deepcopy(layer), [torch.randn(shape) for _ in range(3)], backend)
    x = torch.randn(shape)
    assert_close(int8(x), reference(x))


@pytest.mark.parametrize(
    "qconfig",
    [
        QConfig(activation=QScheme(signed=True)),
        QConfig(activation=QScheme(signed=True, symmetric=True)),
        QConfig(activation=QScheme(signed=False, bits=7)),
        QConfig(weight=QScheme(symmetric=True, bits=4, axis=0)),
        QConfig(weight=QScheme(symmetric=True)),
    ],
    ids=lambda qconfig: f"{qconfig.activation}, {qconfig.weight}",
)
@torch.no_grad()
def test_schemes_give_the_answers_of_the_reference(qconfig: QConfig, backend: str) -> None:
    torch.manual_seed(0)
    reference, int8 = both(Net(), [samples(8, seed=i)[0] for i in range(3)], backend, qconfig)
    x, _ = samples(16, seed=9)
    assert_close(int8(x), reference(x))


def test_weights_with_zero_points_are_refused(backend: str) -> None:
    qconfig = QConfig(weight=QScheme(symmetric=False, axis=0))
    with pytest.raises(BackendError, match="symmetric"):
        qlightning.prepare(Net(), qconfig, mode="ptq", backend=backend)


@torch.no_grad()
def test_parts_run_in_the_runtime_where_torch_has_to_run_the_rest(backend: str) -> None:
    torch.manual_seed(0)
    net = Around(lambda x: x.topk(3, 1)[0] + x[:, :3])
    net(torch.randn(2, 3, 8, 8))
    reference, int8 = both(net, [torch.randn(2, 3, 8, 8) for _ in range(3)], backend)
    x = torch.randn(2, 3, 8, 8)
    assert_close(int8(x), reference(x))
    assert in_runtime(int8, backend)


@torch.no_grad()
def test_what_changes_memory_in_place_is_run_by_torch_and_said(backend: str) -> None:
    torch.manual_seed(0)
    net = Around(lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"))
    net(torch.randn(2, 3, 8, 8))
    reference, int8 = both(net, [torch.randn(2, 3, 8, 8) for _ in range(3)], backend)
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=f"Around runs on 'reference'.*{backend} cannot take it.*copy_"):
        found = int8(x)
    assert torch.equal(found, reference(x))
    assert all("in place" in row.reason for row in report(int8).float_layers)
    assert not report(int8).int8_layers
    assert torch.equal(int8(x), found)  # without a word


@torch.no_grad()
def test_the_report_says_what_computes_each_layer(int8: Any, backend: str) -> None:
    rows = report(int8).layers
    assert {row.kernel for row in rows} == {f"{backend}, which compiles it when it is first called"}
    int8(samples(2)[0])
    rows = report(int8).layers
    kernels = {row.name: row.kernel or row.reason for row in rows}
    assert all(f"{backend} " in text and "first called" not in text for text in kernels.values())
    integer = {"openvino": "u8 to", "onnxruntime": "QLinearConv"}[backend]
    assert integer in kernels["squeeze"], kernels
    assert str(report(copy.deepcopy(int8))) == str(report(int8))


@torch.no_grad()
def test_excluded_layers_stay_float(backend: str) -> None:
    torch.manual_seed(0)
    reference, int8 = both(Net(), [samples(8)[0]], backend, QConfig(exclude=("conv2",)))
    x, _ = samples(4, seed=3)
    assert_close(int8(x), reference(x))
    # Where nothing rounds the result of conv1, ONNX Runtime has no int8 kernel for it; the report names it, too.
    rows = {row.name: row.reason for row in report(int8).float_layers}
    assert [name for name, reason in rows.items() if reason.startswith("excluded")] == ["conv2"]
    assert rows.keys() - {"conv2"} == ({"conv1"} if backend == "onnxruntime" else set())
    changed = copy.deepcopy(int8.state_dict())
    changed["conv2.weight"] *= -1
    int8.load_state_dict(changed)
    reference.load_state_dict(changed)
    assert_close(int8(x), reference(x))


@torch.no_grad()
@pytest.mark.parametrize("way", ["in place", "child", "replaced", "buffer"])
def test_changes_of_float_parts_count_from_the_next_call_on(way: str, backend: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 8, 8)
    reference, int8 = both(net, [x], backend, QConfig(exclude=("2",)))
    before = int8(x)
    for model in (reference, int8):
        conv, bn = model.get_submodule("2"), model.get_submodule("3")
        if way == "in place":
            conv.weight *= -1
        elif way == "child":
            conv.load_state_dict({name: value * -1 for name, value in conv.state_dict().items()})
        elif way == "replaced":
            conv.weight = nn.Parameter(-conv.weight)
        else:
            bn.running_mean += 1
    assert_close(int8(x), reference(x))
    assert not torch.allclose(int8(x), before)


@torch.no_grad()
def test_any_shape_and_memory_layout_will_do(int8: Any, reference: Any) -> None:
    for shape in ((1, 3, 8, 8), (5, 3, 8, 8), (2, 3, 12, 10), (1, 3, 8, 8), (0, 3, 8, 8)):
        x = torch.randn(shape)
        if len(x):
            assert_close(int8(x), reference(x))
        assert int8(x).shape == reference(x).shape
    x = torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)
    assert_close(int8(x), reference(x))
    assert_close(int8(x[::2, :, :, ::2]), reference(x[::2, :, :, ::2]))


@torch.no_grad()
def test_a_shape_in_use_stays_compiled(int8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from qlightning.backends import runtime  # it needs onnx

    compiled = []
    whole = runtime.Runtime._compile
    monkeypatch.setattr(
        runtime.Runtime, "_compile", lambda self, leaves: compiled.append(len(leaves[0])) or whole(self, leaves)
    )
    monkeypatch.setattr(runtime, "MAX_SHAPES", 2)
    for batch in (1, 2, 1, 3, 1, 2):
        int8(samples(batch)[0])
    assert compiled == [1, 2, 3, 2]


@torch.no_grad()
def test_results_are_the_callers(int8: Any) -> None:
    x, _ = samples(4)
    first = int8(x)
    kept = first.clone()
    second = int8(x + 1)
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)
    first += 1
    assert torch.equal(int8(x), kept)


@torch.no_grad()
def test_several_inputs_and_a_dict_of_results(backend: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 5, 8), torch.randn(4, 1, 16)) for _ in range(3)]
    reference, int8 = both(Encoder(), batches, backend)
    found, expected = int8(*batches[0]), reference(*batches[0])
    assert list(found) == ["logits", "features"]
    for name, value in expected.items():
        assert_close(found[name], value)


class Flagged(nn.Module):
    """Flags, numbers, lists of tensors, None: what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, images: list[Tensor], double: bool = False, shift: Tensor | None = None) -> Any:
        y = self.conv(images[0]) + self.conv(images[1])
        y = y * 2 if double else y
        return (y if shift is None else y + shift), double, None


@torch.no_grad()
def test_arguments_and_results_that_are_no_tensors(backend: str) -> None:
    torch.manual_seed(0)
    pair, shift = [torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)], torch.randn(1, 4, 1, 1)
    net = qlightning.prepare(Flagged().eval(), mode="ptq", backend=backend)
    qlightning.calibrate(net, [(pair,)])
    calls: list[dict[str, Any]] = [{}, {"double": True}, {"shift": shift}]
    for keywords in calls:
        net(pair, **keywords)
    reference, int8 = qlightning.convert(net, backend="reference"), qlightning.convert(net)
    for keywords in calls:
        found, expected = int8(pair, **keywords), reference(pair, **keywords)
        assert found[1:] == expected[1:]
        assert_close(found[0], expected[0])


@torch.no_grad()
def test_empty_results_and_empty_values_between(backend: str) -> None:
    class Parts(nn.Module):
        """Splits rows; ``cdist`` is torch's, so that an empty one comes into a part again."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.fc(x)
            distances = torch.cdist(y[:0], y)
            return y, y[:0], distances.sigmoid() + 1

    torch.manual_seed(0)
    batches = [torch.randn(3, 4) for _ in range(2)]
    reference, int8 = both(Parts(), batches, backend)
    found, expected = int8(batches[0]), reference(batches[0])
    assert_close(found[0], expected[0])
    assert [y.shape for y in found] == [y.shape for y in expected] == [(3, 4), (0, 4), (0, 3)]


@torch.no_grad()
def test_it_follows_the_threads_of_torch(int8: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    engine = {"openvino": openvino.OpenVINO, "onnxruntime": onnxruntime.OnnxRuntime}[backend]
    compile_model = engine.compile
    monkeypatch.setattr(
        engine, "compile", lambda self, f, threads: (asked.append(threads), compile_model(self, f, threads))[1]
    )
    x, _ = samples(4)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2, 1):
            torch.set_num_threads(threads)
            results.append(int8(x))
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2]
    assert all(torch.equal(result, results[0]) for result in results)


@torch.no_grad()
def test_calls_from_several_threads_do_not_mix(int8: Any) -> None:
    batches = [samples(4, seed=i)[0] for i in range(8)]
    expected = [int8(x) for x in batches]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(20):
            if not torch.equal(int8(batches[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_copies_are_apart_and_follow_their_codes(int8: Any, reference: Any) -> None:
    x, _ = samples(4)
    expected = int8(x)
    copied = copy.deepcopy(int8)
    copied.fc.codes.zero_()
    copied.fc.repack()
    assert not torch.equal(copied(x), expected)
    assert torch.equal(int8(x), expected)
    copied.fc.codes.copy_(int8.fc.codes)
    copied.fc.repack()
    assert torch.equal(copied(x), expected)
    assert set(int8.state_dict()) == set(reference.state_dict())


@pytest.mark.parametrize("callback", [QuantizationAwareTraining, PostTrainingQuantization])
def test_a_trainer_tests_and_validates_on_it(callback: Any, backend: str, tmp_path: Any) -> None:
    pl.seed_everything(0)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quantization = callback(
        backend=backend, **({"validate_int8": True} if callback is QuantizationAwareTraining else {})
    )
    model = task(pl)
    trainer = pl.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[quantization], **options)
    trainer.fit(model, loader(), loader())
    trainer.test(model, loader(20, seed=1))
    assert report(model.net).backend == backend
    assert all(row.kernel.startswith(backend) for row in report(model.net).int8_layers)
    x, _ = samples(4)
    assert model.net(x).shape == (4, 3)


@torch.no_grad()
def test_saving_and_loading(int8: Any, backend: str, tmp_path: Any) -> None:
    x, _ = samples(4)
    expected = int8(x)
    qlightning.save(int8, tmp_path / "net.pt2")
    assert torch.equal(qlightning.load(tmp_path / "net.pt2", backend=backend)(x), expected)
    with pytest.warns(UserWarning, match=f"made for backend '{backend}'"):
        qlightning.load(tmp_path / "net.pt2", backend="reference")


def test_gradients_are_not_asked_for(int8: Any) -> None:
    x = samples(4)[0].requires_grad_()
    assert not int8(x).requires_grad
    with torch.inference_mode():
        assert int8(x.detach()).shape == (4, 3)


@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("missing", ["itself", "onnx"])
def test_a_missing_package_is_named_with_its_extra(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = name if missing == "itself" else missing
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(registry, "backends", registry.backends.__wrapped__)
    message = (
        rf"'{name}' cannot run here: it needs .*{package}.*pip install 'qlightning\[{name}\]'.*Available: .*reference"
    )
    with pytest.raises(BackendError, match=message):
        qlightning.prepare(Net(), mode="ptq", backend=name)
