"""Files of int8 models: the same bits elsewhere, on other backends, and what they say."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
import torchvision
from torch import nn

from qlightning import QConfig, QScheme, load, prepare, quantize_model, report, save
from qlightning.affine import sqnr
from qlightning.backends import available, backends, registry
from qlightning.errors import ArtifactError, BackendError, ConfigError
from qlightning.export import metadata_of
from tests.callbacks.nets import samples
from tests.export.nets import encoder_int8, small_int8


@pytest.fixture(scope="module")
def int8():
    return small_int8()


@pytest.fixture(scope="module")
def path(int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("pt2") / "small.pt2"
    save(int8, path, metrics={"accuracy": 0.5}, class_names=["red", "green", "blue"], source=__file__)
    return path


@pytest.mark.parametrize("size", [8, 12])
def test_the_loaded_model_is_the_saved_one_to_the_bit(path, int8, size):
    loaded = load(path)
    for batch in (1, 2, 9):
        x = torch.randn(batch, 3, size, size)
        assert torch.equal(loaded(x), int8(x))
    assert torch.equal(loaded(x=x), int8(x))
    assert loaded.metadata.inputs[0].shape == (-1, 3, -1, -1)


def test_a_fresh_process_gives_the_same_bits_without_the_source_code(path, int8, tmp_path):
    x, _ = samples(64, seed=5)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, qlightning\n"
        "net = qlightning.load(sys.argv[1])\n"
        "torch.save(net(torch.load(sys.argv[2])), sys.argv[3])\n"
        "assert 'tests.export.nets' not in sys.modules\n"
    )
    names = [str(path), str(tmp_path / "x.pt"), str(tmp_path / "y.pt")]
    subprocess.run([sys.executable, "-c", code, *names], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(tmp_path / "y.pt"), int8(x))


def test_plain_torch_export_runs_it_too(path, int8):  # C06
    x, _ = samples(16, seed=6)
    found = torch.export.load(path).module()(x)
    assert torch.equal(found, load(path, backend="reference")(x))
    assert sqnr(found, int8(x)) > 40


NETS = ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"]


@pytest.mark.parametrize("name", [NETS[2], *(pytest.param(name, marks=pytest.mark.slow) for name in NETS[:2])])
@pytest.mark.filterwarnings("ignore")
def test_nets_of_torchvision_are_bit_equal(name, tmp_path):
    torch.manual_seed(0)
    net, x = torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)
    net(x)
    int8 = quantize_model(net.eval(), [x])
    save(int8, tmp_path / "net.pt2")
    loaded = load(tmp_path / "net.pt2")
    assert torch.equal(loaded(x), int8(x))
    assert torch.equal(loaded(x[:1, :, :32, :48]), int8(x[:1, :, :32, :48]))
    kernels = [(row.name, row.kernel) for row in report(loaded).layers]
    assert kernels == [(row.name, row.kernel) for row in report(int8).layers]


class Every(nn.Module):
    """Layers of every kind, in one to three dimensions, transposed, grouped, used twice, with and without bias."""

    def __init__(self):
        super().__init__()
        self.conv1d, self.conv3d = nn.Conv1d(4, 4, 3, padding=1), nn.Conv3d(1, 2, 2, bias=False)
        self.up, self.grouped_up = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.same = nn.Conv2d(4, 4, 2, padding="same", padding_mode="reflect")
        self.weight, self.offset = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(1, 3))
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(3, 2)

    def forward(self, x, scale=None):
        y = self.grouped_up(self.up(x))
        y = self.norm(self.same(nn.functional.leaky_relu(y, 0.1)))
        y = nn.functional.interpolate(y, scale_factor=2).flatten(2)
        y = self.conv1d(torch.sigmoid(self.conv1d(y)))
        z = self.conv3d(x[:, None]).mean((1, 2, 3, 4))
        y = nn.functional.linear(y.mean(2), self.weight) + z[:, None] + self.offset
        first, second = y.chunk(2, dim=0) if scale is None else (y * scale, y)
        return (first, [second.clamp(-1.0, 1.0), self.out(second)])


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_layer_and_nested_results(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 4, 6, 6)
    int8 = quantize_model(Every().eval(), [x])
    save(int8, tmp_path / "net.pt2")
    loaded = load(tmp_path / "net.pt2")
    first, (second, third) = loaded(x)
    expected = int8(x)
    assert isinstance(loaded(x)[1], list)
    for found, wanted in zip((first, second, third), (expected[0], *expected[1]), strict=True):
        assert torch.equal(found, wanted)
    for name, layer in loaded.named_modules():
        if hasattr(layer, "codes"):
            assert layer.weight() == int8.get_submodule(name).weight()


MOVES = {
    "x[:, 1:5]": lambda x: x[:, 1:5],
    "x[:, :, ::2, -5:]": lambda x: x[:, :, ::2, -5:],
    "x[..., 0, :]": lambda x: x[..., 0, :].unsqueeze(2),
    "x[:, None]": lambda x: x[:, None].squeeze(1),
    "x[:, [0, 3]]": lambda x: x[:, [0, 3]],
    "x[:, arange]": lambda x: x[:, torch.arange(x.shape[1] - 1)],
    "expand": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "resize 1d": lambda x: F.interpolate(x.flatten(2), scale_factor=2).unflatten(2, (8, 16)),
    "resize 2d": lambda x: F.interpolate(x, size=(9, 5)),
    "resize 2d exact": lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "resize 3d": lambda x: F.interpolate(x[:, :, None], scale_factor=(1, 2, 2))[:, :, 0],
    "Upsample": nn.Upsample(scale_factor=2),
    "max_pool3d": lambda x: F.max_pool3d(x[:, None], 2)[:, 0],
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 16).unflatten(2, (4, 4)),
    "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(3),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
}


class Moves(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.first, self.last, self.move = nn.Conv2d(3, 8, 3, padding=1), nn.LazyConv2d(4, 3, padding=1), move

    def forward(self, x):
        return self.last(self.move(torch.relu(self.first(x))))


@pytest.mark.parametrize("move", MOVES)
def test_codes_are_moved_as_codes(move, tmp_path):
    torch.manual_seed(0)
    net, x = Moves(MOVES[move]).eval(), torch.randn(4, 3, 8, 8)
    net(x)
    int8 = quantize_model(net, [x])
    save(int8, tmp_path / "net.pt2")
    loaded = load(tmp_path / "net.pt2")
    assert torch.equal(loaded(x), int8(x))
    # Equal codes may come from a float detour, too: the last layer has to run the same kernel.
    assert [row.kernel for row in report(loaded).layers] == [row.kernel for row in report(int8).layers]


def test_several_inputs_a_dict_and_float_parts(tmp_path):
    int8, batch = encoder_int8()
    save(int8, tmp_path / "encoder.pt2")
    loaded, expected = load(tmp_path / "encoder.pt2"), int8(*batch)
    found = loaded(tokens=batch[0], shift=batch[1])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    rows = {row.name: row for row in report(loaded).layers}
    assert not rows["attention.out_proj"].int8
    assert rows["attention.out_proj"].reason
    assert rows["mix"].kernel


def test_a_loaded_model_is_an_int8_model_like_any_other(path, int8, tmp_path):
    loaded, (x, _) = load(path), samples(8)
    assert not loaded.train().training
    assert torch.equal(copy.deepcopy(loaded)(x), int8(x))
    assert loaded.stem.get_submodule("0").weight() == int8.stem[0].weight()
    assert str(report(loaded)) == str(report(int8))
    loaded.load_state_dict(loaded.state_dict())
    save(loaded, tmp_path / "again.pt2")
    assert torch.equal(load(tmp_path / "again.pt2")(x), int8(x))
    with pytest.raises(TypeError, match="missing a required argument"):
        loaded()


def test_the_file_says_what_it_is(path):
    facts = metadata_of(path)
    assert facts.metrics == {"accuracy": 0.5}
    assert facts.class_names == ("red", "green", "blue")
    assert len(facts.source_sha256) == 64
    assert [layer.name for layer in facts.layers if layer.int8] == ["stem.0", "depthwise.0", "squeeze", "excite", "fc"]
    assert {layer.scheme.split()[0] for layer in facts.layers} <= {"int7", "int8"}
    assert facts.mode == "ptq"
    assert facts.cpu
    assert facts.versions["torch"] == torch.__version__


def test_another_backend_is_reported_and_close(path, int8):  # C54
    x, _ = samples(64, seed=5)
    if int8.__dict__["_backend"].name == "reference":
        pytest.skip("this machine has the reference alone")
    with pytest.warns(UserWarning, match=r"made for backend 'onednn' \(CPU: .* runs on 'reference'"):
        reference = load(path, backend="reference")
    assert sqnr(reference(x), int8(x)) > 40


@pytest.mark.parametrize("name", [name for name in ("x86", "fbgemm", "qnnpack") if name in available()])
@pytest.mark.parametrize("suffix", [".pt2", ".safetensors"])
def test_a_file_made_for_a_classic_engine_runs_on_all_backends(name, suffix, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(128, 3))
    x, _ = samples(16)
    scheme = QScheme(bits=7, symmetric=True, axis=0)
    int8 = quantize_model(net, [x], qconfig=QConfig(weight=scheme), backend=name)
    assert report(int8).backend == name
    save(int8, tmp_path / f"net{suffix}")
    model = net if suffix == ".safetensors" else None
    same = load(tmp_path / f"net{suffix}", model, backend=name)
    assert torch.equal(same(x), int8(x))
    for other in (backend for backend in available() if backend != name):
        with pytest.warns(UserWarning, match=f"made for backend '{name}' .* runs on '{other}'"):
            loaded = load(tmp_path / f"net{suffix}", model, backend=other)
        assert report(loaded).backend == other
        assert sqnr(loaded(x), int8(x)) > 40
        assert {key: value.tolist() for key, value in loaded.state_dict().items()} == {
            key: value.tolist() for key, value in same.state_dict().items()
        }


def files_with_full_ranges(tmp_path):
    config = QConfig(weight=QScheme(symmetric=True, axis=0, narrow_range=True))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    save(quantize_model(net, [samples(8)[0]], qconfig=config, backend="reference"), tmp_path / "full.pt2")
    config = QConfig(activation=QScheme())
    save(quantize_model(net, [samples(8)[0]], qconfig=config, backend="reference"), tmp_path / "signed.pt2")


@pytest.mark.skipif("onednn" not in available(), reason="no int8 kernels here")
def test_a_file_that_would_saturate_here_runs_on_the_reference_and_says_so(tmp_path, monkeypatch):  # C55
    from dataclasses import replace

    files_with_full_ranges(tmp_path)
    old = {name: replace(b, reduced="weight" if name == "onednn" else None) for name, b in backends().items()}
    monkeypatch.setattr(registry, "backends", lambda: old)
    with pytest.warns(UserWarning, match="'reference', at float speed: It has full 8-bit"):
        loaded = load(tmp_path / "full.pt2")
    assert report(loaded).backend == "reference"
    with pytest.raises(BackendError, match=r"would saturate\. Load it with backend='reference'"):
        load(tmp_path / "full.pt2", backend="onednn")
    new = {name: replace(b, reduced=None) for name, b in backends().items()}
    monkeypatch.setattr(registry, "backends", lambda: new)
    with pytest.warns(UserWarning, match="made for backend 'reference'"):
        assert report(load(tmp_path / "full.pt2")).backend == "onednn"
    with pytest.warns(UserWarning, match="at float speed: its activations are unsigned"):
        assert report(load(tmp_path / "signed.pt2")).backend == "reference"
    with pytest.raises(BackendError, match="its activations are unsigned"):
        load(tmp_path / "signed.pt2", backend="onednn")


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path, int8):
    with pytest.raises(ConfigError, match=r"possible are .pt2, .safetensors, .onnx, .xml, .pte"):
        save(int8, tmp_path / "net.pth")
    with pytest.raises(ConfigError, match="Convert it first"):
        save(prepare(nn.Sequential(nn.Linear(2, 2))), tmp_path / "net.pt2")
    never = quantize_model(nn.Sequential(nn.Linear(2, 2)), [torch.randn(3, 2)])
    save(never, tmp_path / "net.pt2")  # calibration is a call, too
    with pytest.raises(ConfigError, match="onnxruntime or openvino run"):
        load(tmp_path / "net.onnx")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt2")
    (tmp_path / "text.pt2").write_text("no archive")
    with pytest.raises(ArtifactError, match=r"text\.pt2 is no whole archive"):
        load(tmp_path / "text.pt2")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt2")
    with pytest.raises(ArtifactError, match=r"no 'extra/qlightning.json' in it"):
        load(tmp_path / "tensor.pt2")
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "float.pt2")
    with pytest.raises(ArtifactError, match=r"no 'extra/qlightning.json' in it"):
        load(tmp_path / "float.pt2")


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch, int8):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"old")
    saved = torch.export.save

    def broken(program, name, **kwargs):
        if kwargs:
            raise KeyboardInterrupt
        saved(program, name)

    monkeypatch.setattr(torch.export, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        save(int8, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["net.pt2", "net.onnx"])
def test_an_example_of_other_sizes_is_said_to_be_at_fault(tmp_path, int8, name):
    pytest.importorskip("onnxscript")
    for example in (torch.zeros(1, 4, 8, 8), torch.zeros(8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.int64).bool()):
        with pytest.raises(ConfigError, match=r"Small does not take an example like x of \(.*--input"):
            save(int8, tmp_path / name, example_inputs=example)
    assert not list(tmp_path.iterdir())


class Einsum(nn.Module):
    """Calls with arguments that are texts, or are named as files might be."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.einsum("bi,ij->bj", self.first(x), self.second.weight)
        return self.second(torch.div(nn.functional.gelu(y, approximate="tanh"), 0.1, rounding_mode="floor"))


def test_arguments_are_judged_by_what_they_are(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    int8 = quantize_model(Einsum().eval(), [x])
    save(int8, tmp_path / "net.pt2")
    assert torch.equal(load(tmp_path / "net.pt2")(x), int8(x))
