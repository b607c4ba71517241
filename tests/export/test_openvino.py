"""OpenVINO IR: the same answers, the facts, and the two files that belong together."""

import os

import pytest
import torch
from torch import nn

from qlightning import quantize_model, save
from qlightning.errors import ArtifactError, ConfigError
from qlightning.export import metadata_of, parts_of
from tests.callbacks.nets import samples
from tests.export.nets import Small, encoder_int8, trained

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnxscript")


class WithoutMaximum(Small):
    """OpenVINO 2026.4 shifts a ReduceMax that is quantized behind it by its zero point, also in float nets."""

    def forward(self, x):
        x = self.stem(x)
        x = x + self.act(self.depthwise(x))
        weights = nn.functional.adaptive_avg_pool2d(x, 1)
        x = self.pool(x * torch.sigmoid(self.excite(torch.relu(self.squeeze(weights)))))
        return self.fc(torch.cat([x.mean((2, 3)), weights.flatten(1)], 1))


@pytest.fixture(scope="module")
def int8():
    return quantize_model(trained(WithoutMaximum()), [samples(32, seed=100 + i)[0] for i in range(4)])


@pytest.fixture(scope="module")
def path(int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("openvino") / "small.xml"
    save(int8, path, metrics={"accuracy": 0.5}, class_names=["red", "<green>", "blue & é"], source=__file__)
    return path


def test_openvino_gives_the_same_logits(path, int8):
    x, _ = samples(1000, seed=8)
    expected = int8(x)
    model = openvino.compile_model(str(path), "CPU")
    found = torch.from_numpy(model([x.numpy()])[0].copy())
    step = (expected.max() - expected.min()) / 255
    assert ((found - expected).abs() <= step).all()
    assert torch.equal(found.argmax(1), expected.argmax(1))
    for batch in (1, 5):  # C69
        assert model([x[:batch].numpy()])[0].shape == (batch, 3)


def test_convolutions_run_on_integers(path):
    model = openvino.compile_model(str(path), "CPU").get_runtime_model()
    info = [op.get_rt_info() for op in model.get_ordered_ops()]
    rows = [(entry["layerType"].value, entry["runtimePrecision"].value) for entry in info]
    layers = [precision for kind, precision in rows if kind in ("Convolution", "FullyConnected")]
    assert layers == ["u8"] * 5


def test_the_files_say_what_they_are(path, int8):
    facts = metadata_of(path)
    assert facts.metrics == {"accuracy": 0.5}
    assert facts.class_names == ("red", "<green>", "blue & é")
    assert facts.inputs[0].shape == (-1, 3, 8, 8)
    assert [part.name for part in parts_of(path)] == ["small.xml", "small.bin"]
    codes = sum(module.codes.numel() for module in int8.modules() if hasattr(module, "codes"))
    assert codes <= os.path.getsize(path.with_suffix(".bin")) <= codes + 1500  # scales and biases; int8 weights
    assert sorted(p.name for p in path.parent.iterdir()) == ["small.bin", "small.xml"]


def test_several_inputs_and_results(tmp_path):
    int8, batch = encoder_int8()
    save(int8, tmp_path / "net.xml")
    expected = int8(*batch)
    found = openvino.compile_model(str(tmp_path / "net.xml"), "CPU")([x.numpy() for x in batch])
    for i, name in enumerate(("logits", "features")):
        assert torch.allclose(torch.from_numpy(found[i].copy()), expected[name], atol=0.05 * expected[name].abs().max())


def test_damage_is_noticed(path, tmp_path):
    for part in parts_of(path):
        (tmp_path / part.name).write_bytes(part.read_bytes())
    copy = tmp_path / path.name
    assert metadata_of(copy) == metadata_of(path)
    weights = bytearray((tmp_path / "small.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "small.bin").write_bytes(weights)
    with pytest.raises(ArtifactError, match=r"small\.bin is not the file that was saved with small\.xml"):
        metadata_of(copy)
    (tmp_path / "small.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"small\.bin"):
        metadata_of(copy)
    text = path.read_text()
    copy.write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match="no OpenVINO IR"):
        metadata_of(copy)
    copy.write_text('<!DOCTYPE x [<!ENTITY a "aaaa">]><net>&a;</net>')
    with pytest.raises(ArtifactError, match="declarations"):
        metadata_of(copy)
    copy.write_text("<net/>")
    with pytest.raises(ArtifactError, match="no metadata of qlightning"):
        metadata_of(copy)


def test_what_is_missing_is_said(tmp_path, monkeypatch, int8):
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(ImportError, match=r"qlightning\[openvino\]"):
        save(int8, tmp_path / "net.xml")
    with pytest.raises(ConfigError, match="openvino runs this kind of file"):
        __import__("qlightning").load(tmp_path / "net.xml")
    assert not list(tmp_path.iterdir())
