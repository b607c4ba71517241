"""State dicts with edited contents whose checksum fits: a typed error, soon; and what instances may be like."""

import json
import time

import pytest
import torch
from torch import nn

from qlightning import calibrate, convert, load, prepare, quantize_model, save
from qlightning.errors import ArtifactError, ConfigError, QuantizationError
from qlightning.tensor_file import load_tensors, read_safetensors, write_safetensors
from tests.export.nets import Small, small_int8


class Steps(nn.Module):
    """A layer that is applied as often as the caller says."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, steps=1, size=0):
        for _ in range(steps):
            x = torch.relu(self.layer(x))
        return x * size if size > 0 else x


def steps_int8(*calls):
    torch.manual_seed(0)
    prepared = prepare(Steps().eval(), mode="ptq")
    calibrate(prepared, [torch.randn(8, 4)])
    for arguments in calls:
        prepared(torch.randn(8, 4), **arguments)
    return convert(prepared)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "small.safetensors"
    save(small_int8(), path)
    return path


def forged(source, path, change):
    tensors, texts = read_safetensors(source)
    state = json.loads(texts["qlightning.state"])
    change(state)
    write_safetensors(path, tensors, {**texts, "qlightning.state": json.dumps(state)})
    return path


def test_a_number_in_a_call_does_not_keep_load_busy(tmp_path):
    source = tmp_path / "steps.safetensors"
    save(steps_int8({"steps": 2}), source)

    def change(state):
        state["calls"] = json.loads(json.dumps(state["calls"]).replace('{"constant": 2}', '{"constant": 1000000000}'))

    file = forged(source, tmp_path / "net.safetensors", change)
    start = time.process_time()
    with pytest.raises(ArtifactError, match=r"net\.safetensors.*a number beyond 65536"):
        load(file, model=Steps())
    assert time.process_time() - start < 30


def test_calls_that_are_not_kept_are_warned_of(tmp_path):
    int8 = steps_int8({"size": 2**16 + 1})
    with pytest.warns(UserWarning, match=r"Steps: 1 of the ways of calling it \(.*size=65537.*beyond 65536"):
        save(int8, tmp_path / "net.safetensors")


def pattern_of(state):
    return state["settings"]["qconfig"]


SETTINGS = {
    "very many patterns": (lambda s: pattern_of(s).update(exclude=["stem.*"] * 200_000), "more than 10000 patterns"),
    "very many overrides": (
        lambda s: pattern_of(s).update(overrides={"*" * i: None for i in range(999)}, exclude=["*"] * 9002),
        "more than 10000 patterns",
    ),
    "a long pattern": (lambda s: pattern_of(s).update(exclude=["*a" * 10_000]), "of 20000 characters"),
    "a pattern that is none": (lambda s: pattern_of(s).update(exclude=[3]), "a pattern in qconfig is a int"),
    "patterns as a text": (lambda s: pattern_of(s).update(exclude="abc"), "qconfig.exclude is a str"),
    "an override that is none": (lambda s: pattern_of(s).update(overrides={"fc": 3}), r"overrides\['fc'\] is a int"),
    "overrides in overrides": (lambda s: nest(pattern_of(s), 20), "nested too deeply"),
    "no scheme": (lambda s: pattern_of(s).pop("weight"), "qconfig.weight is a NoneType"),
    "a scheme of other bits": (lambda s: pattern_of(s)["weight"].update(bits=99), "qconfig.weight: QScheme bits=99"),
    "a scheme of other settings": (lambda s: pattern_of(s)["weight"].update(code="x"), "qconfig.weight: .*code"),
    "no observer": (lambda s: pattern_of(s).update(activation_observer="x"), "activation_observer is a str"),
    "another mode": (lambda s: s["settings"].update(mode="x"), "mode is 'x'"),
    "no backend": (lambda s: s["settings"].pop("backend"), "backend is a NoneType"),
    "another format": (lambda s: s["settings"].update(format=9), "in format 9"),
    "no settings": (lambda s: s["settings"].clear(), "in format None"),
    "no QConfig": (lambda s: s["settings"].update(qconfig=[]), "qconfig is a list"),
}


def nest(config, depth):
    if depth:
        config["overrides"] = {"*": dict(config)}
        nest(config["overrides"]["*"], depth - 1)


@pytest.mark.parametrize(("change", "message"), SETTINGS.values(), ids=SETTINGS.keys())
def test_damaged_settings_are_named(path, tmp_path, change, message):
    file = forged(path, tmp_path / "net.safetensors", change)
    start = time.process_time()
    with pytest.raises(QuantizationError, match=rf"net\.safetensors: .*{message}"):
        load(file, model=Small())
    assert time.process_time() - start < 30


def test_a_key_that_is_there_twice_is_a_typed_error(path, tmp_path):
    tensors, texts = read_safetensors(path)
    texts["qlightning.state"] = texts["qlightning.state"].replace("{", '{"calls": {}, ', 1)
    write_safetensors(tmp_path / "net.safetensors", tensors, texts)
    with pytest.raises(ArtifactError, match="'calls' is there twice"):
        load(tmp_path / "net.safetensors", model=Small())
    write_safetensors(tmp_path / "t.safetensors", {}, {"qlightning.tensors": '{"format": 1, "format": 1}'})
    with pytest.raises(ArtifactError, match="'format' is there twice"):
        load_tensors(tmp_path / "t.safetensors")


# Instances


def spoiled(net):
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.fill_(float("nan"))
    return net


def on_meta():
    with torch.device("meta"):
        return Small()


INSTANCES = {
    "on the meta device": on_meta,
    "of NaN": lambda: spoiled(Small()),
    "in half precision": lambda: Small().half(),
    "in double precision": lambda: Small().double(),
    "frozen": lambda: Small().requires_grad_(False),
}


@pytest.mark.parametrize("build", INSTANCES.values(), ids=INSTANCES.keys())
def test_the_weights_of_the_instance_do_not_matter(path, build):
    x = torch.randn(4, 3, 8, 8)
    net = build()
    before = {name: (value.dtype, value.device) for name, value in net.state_dict().items()}
    assert torch.equal(load(path, model=net)(x), load(path, model=Small())(x))
    assert before == {name: (value.dtype, value.device) for name, value in net.state_dict().items()}


class Positions(nn.Module):
    """Weights that two layers share, a mask with infinity, and values that no state dict has."""

    def __init__(self, persistent=True):
        super().__init__()
        self.first, self.second, self.exact = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, float("-inf")]))
        self.register_buffer("positions", torch.arange(4.0), persistent=persistent)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x))) + self.positions
        return torch.softmax(y + self.mask, 1) + self.exact(x.double())


def test_what_no_state_dict_has_is_taken_from_the_instance(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    for persistent in (True, False):
        file = tmp_path / f"{persistent}.safetensors"
        int8 = quantize_model(Positions(persistent).eval(), [x], exclude=["exact"])
        save(int8, file)
        assert torch.equal(load(file, model=spoiled(Positions(persistent)))(x), int8(x))
        with torch.device("meta"):
            net = Positions(persistent)
        if persistent:
            assert torch.equal(load(file, model=net)(x), int8(x))
        else:
            with pytest.raises(ConfigError, match="positions is on the meta device and in no state dict"):
                load(file, model=net)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
def test_defaults_of_the_user_do_not_matter(tmp_path, suffix):
    x, int8 = torch.randn(4, 3, 8, 8), small_int8()
    net = [Small()] if suffix == ".safetensors" else []
    expected = int8(x)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        save(int8, tmp_path / f"net{suffix}")
        loaded = load(tmp_path / f"net{suffix}", *net)
        assert torch.get_default_dtype() == torch.float64
        assert torch.empty(0).is_meta
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(loaded(x), expected)
