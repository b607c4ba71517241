"""OpenVINO IR: the same answers, the facts, and the two files that belong together."""

import os

import pytest
import torch
from torch import nn

from qlightning import quantize_model, save
from qlightning.cli import main
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


class Killed(BaseException):
    """In the place of the end of the process."""


@pytest.mark.parametrize("written", [0, 1, 2])
def test_what_a_killed_call_leaves_is_a_pair_or_noticed(tmp_path, monkeypatch, int8, capsys, written):
    path, new = tmp_path / "net.xml", quantize_model(trained(), [samples(32, seed=1)[0]])
    save(int8, path, metrics={"old": 1})
    replace, done = os.replace, []

    def killed(source, target):
        if str(target).endswith(("net.xml", "net.bin")):
            if len(done) == written:
                raise Killed
            done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    if written < 2:
        with pytest.raises(Killed):
            save(new, path, metrics={"new": 1})
    else:
        save(new, path, metrics={"new": 1})
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.bin", "net.xml"]
    if written == 1:
        with pytest.raises(ArtifactError, match=r"net\.bin is not the file that was saved with net\.xml"):
            metadata_of(path)
        save(int8, tmp_path / "whole.xml")
        for command in ("bench", "compare"):  # OpenVINO itself would take them
            assert main([command, str(tmp_path / "whole.xml"), str(path)]) == 1
            assert "net.bin is not the file that was saved with net.xml" in capsys.readouterr().err
    else:
        assert list(metadata_of(path).metrics) == ["new" if written else "old"]


def test_a_failed_call_leaves_nothing(tmp_path, monkeypatch, int8):
    write, calls = openvino.save_model, []

    def full(*args, **kwargs):
        write(*args, **kwargs)
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no space left")

    monkeypatch.setattr(openvino, "save_model", full)
    with pytest.raises(RuntimeError, match="no space left"):
        save(int8, tmp_path / "net.xml")
    assert not list(tmp_path.iterdir())


def test_links_and_long_names(tmp_path, int8):
    path = tmp_path / f"{'n' * 240}.xml"
    path.symlink_to("elsewhere")
    save(int8, path)
    assert path.is_symlink()
    assert metadata_of(path).inputs[0].shape == (-1, 3, 8, 8)
    x, _ = samples(2, seed=9)
    assert openvino.compile_model(str(path), "CPU")([x.numpy()])[0].shape == (2, 3)
