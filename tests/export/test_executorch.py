"""ExecuTorch programs: that its runtime computes what the int8 model does, in int8 where XNNPACK has kernels for it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qlightning import QConfig, QScheme, load, quantize_model, save
from qlightning.errors import ArtifactError, ConfigError
from qlightning.export import Metadata
from qlightning.export.executorch import save_executorch
from tests.callbacks.nets import samples
from tests.export.nets import encoder_int8, small_int8

pytest.importorskip("executorch.exir")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def int8():
    return small_int8()


@pytest.fixture(scope="module")
def path(int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("executorch") / "small.pte"
    save_executorch(int8, path, metrics={"accuracy": 0.5}, class_names=["red", "green", "blue"], source=__file__)
    return path


def run(path, *inputs, method="forward"):
    from executorch.runtime import Runtime

    return Runtime.get().load_program(path).load_method(method).execute(list(inputs))


def step_of(values):
    """A code of the 8-bit grid that values of this range would have."""
    return (values.max() - values.min()) / 255


def test_it_gives_the_same_answers(path, int8):
    for seed in range(10):
        x, _ = samples(32, seed=seed)
        expected = int8(x)
        (found,) = run(path, x)
        assert torch.equal(found.argmax(1), expected.argmax(1))
        assert (found - expected).abs().max() <= step_of(expected)


def test_the_batch_size_is_free_up_to_that_of_the_example(path, int8):
    for size in (1, 2, 7, 32):
        assert run(path, samples(size)[0])[0].shape == (size, 3)
    with pytest.raises(RuntimeError):
        run(path, samples(33)[0])


def test_an_example_of_one_image_makes_a_program_for_one(tmp_path, int8):
    x, _ = samples(1)
    found = save_executorch(int8, tmp_path / "one.pte", example_inputs=x)
    assert found.inputs[0].shape == (1, 3, 8, 8)
    assert torch.allclose(run(tmp_path / "one.pte", x)[0], int8(x), atol=0.01)


def test_the_file_says_what_it_is(path):
    (text,) = run(path, method="qlightning")
    found = Metadata.from_json(text, str(path))
    assert found.inputs[0].shape == (-1, 3, 8, 8)
    assert found.inputs[0].example == (32, 3, 8, 8)
    assert found.metrics == {"accuracy": 0.5}
    assert found.class_names == ("red", "green", "blue")
    assert len(found.source_sha256) == 64


def test_a_loaded_model_can_be_saved(tmp_path, int8, path):
    save(int8, tmp_path / "net.pt2")
    loaded = load(tmp_path / "net.pt2")
    save_executorch(loaded, tmp_path / "net.pte")
    x, _ = samples(8)
    assert torch.equal(run(tmp_path / "net.pte", x)[0], run(path, x)[0])


def conv(inputs=3, outputs=8, kind=nn.Conv2d, **options):
    return kind(inputs, outputs, 3, **{"padding": 1, **options})


class Net(nn.Module):
    """A forward over layers a, b, c."""

    def __init__(self, forward, a, b, c=None):
        super().__init__()
        self.a, self.b, self.c, self.call = a, b, c, forward

    def forward(self, x):
        return self.call(self, x)


def dead(net):
    """Its layer a gives zeros behind a ReLU, whose grid has steps close to zero."""
    nn.init.constant_(net.a.bias, -100.0)
    return net


relu = torch.relu
WIDE = nn.ConvTranspose1d
IMAGE, SIGNAL = (4, 3, 12, 12), (4, 3, 20)
NETS = {
    "shared layer": (lambda: Net(lambda m, x: m.b(relu(m.b(relu(m.a(x))))), conv(), conv(8, 8)), IMAGE),
    "residual": (lambda: Net(lambda m, x: m.c(relu(m.b(y := relu(m.a(x))) + y)), conv(), conv(8, 8), conv(8)), IMAGE),
    "pooled": (
        lambda: Net(lambda m, x: m.c(F.max_pool2d(relu(m.b(F.max_pool2d(m.a(x), 2))), 2)), conv(), conv(8, 8), conv(8)),
        IMAGE,
    ),
    "cat": (
        lambda: Net(lambda m, x: m.c(torch.cat([relu(m.a(x)), m.b(x)], 1)), conv(3, 4), conv(3, 4), conv(8)),
        IMAGE,
    ),
    "chunks": (
        lambda: Net(lambda m, x: m.b(torch.cat(relu(m.a(x)).chunk(2, 1)[::-1], 1)), conv(), conv(8)),
        IMAGE,
    ),
    "pad": (lambda: Net(lambda m, x: relu(m.b(F.pad(m.a(x), (1, 0, 2, 1)))).mean((2, 3)), conv(), conv(8)), IMAGE),
    "nearest": (lambda: Net(lambda m, x: m.b(F.interpolate(relu(m.a(x)), scale_factor=2)), conv(), conv(8)), IMAGE),
    "depthwise": (
        lambda: Net(lambda m, x: m.c(relu(m.b(F.relu6(m.a(x))))), conv(), conv(8, 16, groups=8), conv(16, 8, groups=2)),
        IMAGE,
    ),
    "linear": (
        lambda: Net(lambda m, x: m.b(relu(m.a(x))), nn.Linear(8, 16), nn.Linear(16, 4, bias=False)),
        (4, 5, 8),
    ),
    "transposed": (
        lambda: Net(
            lambda m, x: m.c(relu(m.b(relu(m.a(x))))),
            conv(),
            conv(8, 8, nn.ConvTranspose2d, stride=2, groups=2),
            conv(8),
        ),
        IMAGE,
    ),
    "one dimension": (
        lambda: Net(
            lambda m, x: m.c(relu(m.b(relu(m.a(x))))),
            conv(kind=nn.Conv1d),
            conv(8, 8, WIDE, stride=2, output_padding=1),
            conv(8, kind=nn.Conv1d, dilation=2),
        ),
        SIGNAL,
    ),
    "dead layer": (
        lambda: dead(Net(lambda m, x: m.c(relu(m.b(relu(m.a(x))))), conv(), conv(8, 8), conv(8))),
        IMAGE,
    ),
    "dead summand": (
        lambda: dead(Net(lambda m, x: m.c(relu(m.a(x)) + relu(m.b(x))), conv(), conv(), conv(8))),
        IMAGE,
    ),
    "dead factor": (
        lambda: dead(Net(lambda m, x: m.c(relu(m.a(x)) * relu(m.b(x))), conv(), conv(), conv(8))),
        IMAGE,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_each_pattern_computes_what_the_int8_model_does(name, tmp_path):
    make, shape = NETS[name]
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(3)]
    int8 = quantize_model(make().eval(), batches)
    save_executorch(int8, tmp_path / "net.pte")
    for x in batches:
        expected = int8(x)
        (found,) = run(tmp_path / "net.pte", x)
        # A sum of int8 products may be rounded to another code than the same sum in float: here to one.
        assert (found - expected).abs().max() <= 2 * step_of(expected)


def test_weights_of_layers_that_are_rounded_are_int8_in_the_file(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3), nn.ReLU6()
    )
    net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)])
    int8 = quantize_model(net.eval(), [torch.randn(2, 3, 16, 16)])
    save_executorch(int8, tmp_path / "net.pte")
    weights = sum(m.weight.numel() for m in net if hasattr(m, "weight"))
    assert (tmp_path / "net.pte").stat().st_size < 1.5 * weights


def test_several_inputs_a_dict_and_float_parts(tmp_path):
    int8, batch = encoder_int8()
    found = save_executorch(int8, tmp_path / "encoder.pte")
    assert [spec.name for spec in found.inputs] == ["tokens", "shift"]
    expected = int8(*batch)
    for result, name in zip(run(tmp_path / "encoder.pte", *batch), ("logits", "features"), strict=True):
        assert (result - expected[name]).abs().max() <= 2 * step_of(expected[name])


class Halves(nn.Module):
    """A part that cannot be traced stands between two that can."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


def test_what_cannot_be_a_program_says_why(tmp_path, int8, monkeypatch):
    path = tmp_path / "net.pte"
    with pytest.raises(ConfigError, match=r"its int8 parts \(first, second\)"):
        save_executorch(quantize_model(Halves(), [torch.randn(3, 4)]), path)
    with pytest.raises(ConfigError, match="Convert it first"):
        save_executorch(nn.Linear(2, 2), path)
    seven_bits = QConfig(activation=QScheme(bits=7, signed=False))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ArtifactError, match=r"all 256 codes; here is a grid from 0 to 127 \(uint8\)"):
        save_executorch(quantize_model(net, [torch.randn(3, 4)], qconfig=seven_bits, backend="reference"), path)
    volumes = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 3))
    with pytest.raises(ArtifactError, match="does not run"):
        save_executorch(quantize_model(volumes, [torch.randn(2, 2, 8, 8, 8)]), path)
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    with pytest.raises(ImportError, match=r"pip install 'qlightning\[executorch\]'"):
        save_executorch(int8, path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    int8 = quantize_model(nn.Sequential(nn.Linear(4, 2)), [torch.randn(8, 4)])
    path = tmp_path / "net.pte"
    path.write_bytes(b"old")
    monkeypatch.setattr(
        "qlightning.export.executorch._run_once", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        save_executorch(int8, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    int8 = quantize_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [x := torch.randn(8, 4)])
    before, names = int8(x), list(int8.state_dict())
    save_executorch(int8, tmp_path / "net.pte")
    assert torch.equal(int8(x), before)
    assert list(int8.state_dict()) == names
    save(int8, tmp_path / "net.pt2")  # from the same graph
    assert torch.equal(load(tmp_path / "net.pt2")(x), before)
