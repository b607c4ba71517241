"""Int8 state dicts in safetensors: rebuilt on an instance of the float model, and refused by any other."""

import copy

import pytest
import torch
import torchvision
from torch import nn

from qlightning import QConfig, QScheme, calibrate, convert, load, load_tensors, prepare, quantize_model, report, save
from qlightning.errors import ArtifactError, BackendError, ConfigError
from qlightning.export import metadata_of
from qlightning.observers import PercentileObserver
from tests.callbacks.nets import samples
from tests.export.nets import Encoder, Small, encoder_int8, small_int8


@pytest.fixture(scope="module")
def int8():
    return small_int8()


@pytest.fixture(scope="module")
def path(int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "small.safetensors"
    save(int8, path, metrics={"accuracy": 0.5}, class_names=["red", "green", "blue"], source=__file__)
    return path


def test_the_model_is_the_saved_one_to_the_bit(path, int8):
    net = Small()
    before = copy.deepcopy(net.state_dict())
    loaded = load(path, model=net)
    x, _ = samples(64, seed=5)
    assert torch.equal(loaded(x), int8(x))
    assert torch.equal(load(path, model=net, backend="reference")(x), small_int8("reference")(x))
    assert isinstance(loaded, Small)
    assert str(report(loaded)) == str(report(int8))
    assert loaded.stem[0].weight() == int8.stem[0].weight()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert type(net) is Small


def test_a_loaded_model_is_copied_and_saved_like_any(path, int8, tmp_path):
    loaded = copy.deepcopy(load(path, model=Small()))
    x, _ = samples(16, seed=6)
    for name in ("again.safetensors", "again.pt2"):
        facts = save(loaded, tmp_path / name)
        assert facts.metrics == {"accuracy": 0.5}
    assert torch.equal(load(tmp_path / "again.safetensors", Small())(x), int8(x))
    assert torch.equal(load(tmp_path / "again.pt2")(x), int8(x))


def test_the_file_has_the_int8_state_dict_and_the_facts(path, int8):
    tensors = load_tensors(path)
    assert tensors.keys() == int8.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in int8.state_dict().items())
    facts = metadata_of(path)
    assert facts.class_names == ("red", "green", "blue")
    assert facts.inputs[0].shape == (-1, 3, 8, 8)


class Switch(nn.Module):
    """A flag, a number that is branched on, and a dict of tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, twice=False, *, power=1, more=None):
        y = self.a(x["x"]) + (0 if more is None else more)
        if power > 1:
            y = y * power
        return self.b(y) if twice else y


def test_ways_of_calling_are_kept(tmp_path):
    torch.manual_seed(0)
    net, x = prepare(Switch().eval(), mode="ptq"), torch.randn(8, 4)
    calls = [({"x": x}, {}), ({"x": x}, {"twice": True, "power": 3}), ({"x": x}, {"more": x})]
    for argument, options in calls:
        net(argument, **options)

    with torch.no_grad():
        calibrate(net, [({"x": x}, True)])
    int8 = convert(net)
    save(int8, tmp_path / "switch.safetensors")
    loaded = load(tmp_path / "switch.safetensors", model=Switch())
    for argument, options in calls:
        assert torch.equal(loaded(argument, **options), int8(argument, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mobilenet_v3_small", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_nets_of_torchvision(name, tmp_path):
    torch.manual_seed(0)
    net, x = torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)
    net(x)
    int8 = quantize_model(net.eval(), [x], observer=PercentileObserver, exclude=[nn.Linear])
    save(int8, tmp_path / "net.safetensors")
    loaded = load(tmp_path / "net.safetensors", torchvision.models.get_model(name, weights=None))
    assert torch.equal(loaded(x), int8(x))
    assert [row.name for row in report(loaded).float_layers] == [row.name for row in report(int8).float_layers]


class Sorted(nn.Module):
    """Python code on values between two parts, so that it is no single graph."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 3))

    def forward(self, x):
        y = self.first(x)
        return self.second(y.flip(0) if y.sum() > 1e9 else y)


@pytest.mark.filterwarnings("ignore:.*called in one piece")
def test_models_of_several_graphs(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    int8 = quantize_model(Sorted().eval(), [x])
    facts = save(int8, tmp_path / "net.safetensors")
    assert facts.inputs == ()
    assert torch.equal(load(tmp_path / "net.safetensors", Sorted())(x), int8(x))


def test_another_model_is_refused(path, tmp_path):
    class Wider(Small):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 5)

    with pytest.raises(ArtifactError, match=r"another model than Wider: 'fc.codes' is \(3, 16\)"):
        load(path, model=Wider())
    with pytest.raises(ArtifactError, match="another model: Encoder"):
        load(path, model=Encoder())
    with pytest.raises(ConfigError, match=r"load\(path, model=...\)"):
        load(path)
    with pytest.raises(ConfigError, match="an instance of the float model is needed"):
        load(path, model=prepare(Small()))
    with pytest.raises(ConfigError, match="an instance of the float model is needed"):
        load(path, model=Small)
    save(encoder_int8()[0], tmp_path / "e.pt2")
    with pytest.raises(ConfigError, match="leave out model="):
        load(tmp_path / "e.pt2", model=Encoder())
    with pytest.raises(ConfigError, match="does not know the float model"):
        save(load(tmp_path / "e.pt2"), tmp_path / "e.safetensors")
    with pytest.raises(ConfigError, match="is not in int8"):
        save(prepare(Small()), tmp_path / "e.safetensors")


class Options(nn.Module):
    """The same tensors, and as many ways to compute with them as there are options."""

    def __init__(self, stride=1, act=nn.ReLU, factor=2.0, padding_mode="zeros", pool=2, extra=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride, padding=1, padding_mode=padding_mode)
        self.act, self.pool, self.fc = act(), nn.MaxPool2d(pool, 1), nn.Linear(4, 3)
        self.factor, self.extra = factor, extra

    def forward(self, x):
        y = self.pool(self.act(self.conv(x)) * self.factor).mean((2, 3))
        return self.fc(y.flip(1) if self.extra else y)


@pytest.mark.parametrize(
    ("options", "there", "here"),
    [
        ({"stride": 2}, r"\[1, 1\]", r"\[2, 2\]"),
        ({"act": nn.ReLU6}, "relu", "hardtanh"),
        ({"factor": 3.0}, "2.0", "3.0"),
        ({"padding_mode": "reflect"}, "conv2d", "reflect"),
        ({"pool": 3}, "kernel_size=2", "kernel_size=3"),
        ({"extra": True}, "fc.codes", "flip"),
    ],
)
def test_a_net_that_computes_something_else_with_the_same_tensors_is_refused(options, there, here, tmp_path):
    torch.manual_seed(0)
    int8 = quantize_model(Options().eval(), [torch.randn(4, 3, 8, 8)])
    save(int8, tmp_path / "net.safetensors")
    load(tmp_path / "net.safetensors", Options())
    with pytest.raises(
        ArtifactError, match=f"another model than Options as it is here: that .*{there}.*, this .*{here}"
    ):
        load(tmp_path / "net.safetensors", Options(**options))


def test_backends_that_do_not_take_the_schemes(tmp_path):
    config = QConfig(activation=QScheme())
    net = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(8, 4)
    int8 = quantize_model(net, [x], qconfig=config, backend="reference")
    save(int8, tmp_path / "signed.safetensors")
    with pytest.warns(UserWarning, match="'reference', at float speed"):
        loaded = load(tmp_path / "signed.safetensors", net)
    assert torch.equal(loaded(x), int8(x))
    with pytest.raises(BackendError, match="cannot run"):
        load(tmp_path / "signed.safetensors", net, backend="onednn")
