"""The command line, called as the shell calls it."""

import json
import sys

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from qlightning import QuantizationAwareTraining, load, save, save_tensors
from qlightning.cli import main
from tests.callbacks.nets import loader, samples, task
from tests.export.nets import encoder_int8, small_int8
from tests.html.documents import parse

SMALL = "tests.export.nets.Small"


@pytest.fixture(scope="module")
def int8():
    return small_int8()


@pytest.fixture(scope="module")
def folder(int8, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save(int8, folder / "net.pt2", metrics={"accuracy": 0.5}, class_names=["red", "green", "blue"])
    save(int8, folder / "net.safetensors")
    return folder


def called(*arguments, capsys):
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_inspect(folder, capsys):
    status, out, err = called("inspect", folder / "net.pt2", capsys=capsys)
    assert (status, err) == (0, "")
    assert "5 of 5 layers in int8" in out
    assert "x float32 (free, 3, free, free)" in out
    assert "accuracy 0.5" in out
    assert "red, green, blue" in out
    assert any(line.split()[:3] == ["stem.0", "Conv2d", "int8"] for line in out.splitlines())
    status, out, _ = called("inspect", folder / "net.safetensors", "--json", capsys=capsys)
    found = json.loads(out)
    assert status == 0
    assert found["bytes"] == (folder / "net.safetensors").stat().st_size
    assert found["inputs"][0]["shape"] == [-1, 3, 8, 8]
    assert len(found["layers"]) == 5


def test_export_between_files(folder, tmp_path, int8, capsys):
    x, _ = samples(16, seed=1)
    status, out, _ = called("export", folder / "net.safetensors", tmp_path / "a.pt2", "--model", SMALL, capsys=capsys)
    assert status == 0
    assert "5 layers in int8" in out
    assert torch.equal(load(tmp_path / "a.pt2")(x), int8(x))
    pytest.importorskip("onnxscript")
    status, out, _ = called("export", folder / "net.pt2", tmp_path / "a.onnx", "--json", capsys=capsys)
    assert status == 0
    assert json.loads(out)["metrics"] == {"accuracy": 0.5}
    status, out, _ = called("inspect", tmp_path / "a.onnx", capsys=capsys)
    assert "accuracy 0.5" in out


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def trained_by(pl, folder):
    """A checkpoint of a training with quantization, and the int8 model that it ended in."""
    torch.manual_seed(0)
    callback = QuantizationAwareTraining()
    settings = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", callbacks=callback, default_root_dir=folder, **settings)
    trainer.fit(task(pl, Net(width=6)), loader())
    (path,) = folder.rglob("*.ckpt")
    return path, callback.int8_model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_by(pl, tmp_path_factory.mktemp("checkpoint"))


def test_export_of_a_checkpoint(trained, tmp_path, capsys):
    path, int8 = trained
    net = ["--model", "tests.cli.test_cli.Net", "width=6"]
    status, out, _ = called("export", path, tmp_path / "net.pt2", *net, "--input", "1,3,8,8", capsys=capsys)
    assert status == 0, out
    loaded = load(tmp_path / "net.pt2")
    x, _ = samples(16, seed=2)
    assert torch.equal(loaded(x), int8(x))
    assert len(loaded.metadata.source_sha256) == 64
    config = tmp_path / "config.yaml"
    config.write_text("model:\n  _target_: tests.cli.test_cli.with_weights\n  width: 6\n  weights: file.pt\n")
    arguments = ["export", path, tmp_path / "again.pt2", "--config", config, "--input", "1,3,8,8"]
    assert called(*arguments, capsys=capsys)[0] == 0
    assert torch.equal(load(tmp_path / "again.pt2")(x), int8(x))


@pytest.mark.parametrize("suffix", [".pt2", ".safetensors"])
def test_export_of_a_checkpoint_of_the_other_lightning(tmp_path, capsys, suffix):
    path, int8 = trained_by(pytest.importorskip("lightning.pytorch"), tmp_path)
    net = ["--model", "tests.cli.test_cli.Net", "width=6"]
    out = tmp_path / f"net{suffix}"
    status, _, err = called("export", path, out, *net, "--input", "1,3,8,8", capsys=capsys)
    assert (status, err) == (0, "")
    x, _ = samples(16, seed=2)
    loaded = load(out, Net(width=6)) if suffix == ".safetensors" else load(out)
    assert torch.equal(loaded(x), int8(x))


def with_weights(width, weights):
    assert weights is None
    return Net(width)


def test_export_says_what_is_wrong_with_a_checkpoint(trained, tmp_path, capsys):
    path, _ = trained
    out = tmp_path / "net.pt2"
    net = ["--model", "tests.cli.test_cli.Net"]

    def error(*arguments):
        status, text, err = called("export", *arguments, capsys=capsys)
        assert status == 1
        assert text == ""
        return err

    assert "--input is needed" in error(path, out, *net, "width=6")
    assert "name the float net" in error(path, out, "--input", "1,3,8,8")
    assert "belongs to another net than Net" in error(path, out, *net, "width=5", "--input", "1,3,8,8")
    assert "Did you mean 'Net'" in error(path, out, "--model", "tests.cli.test_cli.Ned", "--input", "1,3,8,8")
    assert "unexpected keyword argument 'depth'" in error(path, out, *net, "depth=2", "--input", "1,3,8,8")
    assert "No module named 'nowhere'" in error(path, out, "--model", "nowhere.Net", "--input", "1,3,8,8")
    assert "gives a OrderedDict" in error(path, out, "--model", "collections.OrderedDict", "--input", "1,3,8,8")
    assert "sizes are needed" in error(path, out, *net, "width=6", "--input", "1,x")
    assert "was in the training" in error(path, out, *net, "width=5", "--input", "1,3,8,8")
    assert len(error(path, out, *net, "width=5", "--input", "1,3,8,8")) < 2000
    assert "does not take an example like x of (1, 4, 8, 8)" in error(path, out, *net, "width=6", "--input", "1,4,8,8")
    for suffix in (".onnx", ".xml", ".pte"):
        assert "begin with a .pt2 file" in error(tmp_path / f"net{suffix}", out)
    one = error(path, out, *net, "width=6", "--input", "1,3,8,8", "--part", "body")
    assert "has one net, 'net': leave out --part" in one
    torch.save(Net().state_dict(), tmp_path / "float.ckpt")
    assert "does not say how its net was prepared" in error(tmp_path / "float.ckpt", out, *net, "--input", "1,3,8,8")
    torch.save(Net(), tmp_path / "whole.pt")
    whole = error(tmp_path / "whole.pt", out, *net, "--input", "1,3,8,8")
    assert "without executing" in whole
    assert "weights_only" not in whole  # torch advises to switch that off
    assert "the suffix says" in error(path, tmp_path / "net.bin", *net)
    assert "no such file" in error(tmp_path / "none.ckpt", out, *net)
    assert not out.exists()


def test_bench(folder, capsys):
    arguments = ["bench", folder / "net.pt2", "--batch", 1, 4, "--threads", 1, "--rounds", 3, "--model", SMALL]
    status, out, err = called(*arguments, capsys=capsys)
    assert (status, err) == (0, "")
    assert [line.split()[1:3] for line in out.splitlines()[2:]] == [["1", "1"], ["1", "1"], ["1", "4"], ["1", "4"]]
    _, out, _ = called(*arguments, "--json", capsys=capsys)
    rows = json.loads(out)["results"]
    assert all(row["ms"] > 0 and row["speedup"] > 0 for row in rows)
    assert [row["model"] for row in rows] == [str(folder / "net.pt2"), "float"] * 2
    status, _, err = called("bench", folder / "net.safetensors", capsys=capsys)
    assert status == 1
    assert "name the float net by --model" in err


def test_compare(folder, tmp_path, capsys):
    other = small_int8("reference")
    other.fc.codes[0] = 0
    save(other, tmp_path / "other.pt2")
    x, _ = samples(16, seed=3)
    save_tensors({"x": x}, tmp_path / "x.safetensors")
    arguments = ["compare", folder / "net.pt2", tmp_path / "other.pt2", "--inputs", tmp_path / "x.safetensors"]
    status, out, _ = called(*arguments, "--json", "--backend", "reference", capsys=capsys)
    found = json.loads(out)
    assert status == 0
    layers = {row["name"]: row for row in found["layers"]}
    assert len(layers) == 5
    assert 0 < found["outputs"][0]["sqnr"] < 40
    assert layers["fc"]["weight_sqnr"] < 40
    assert layers["fc"]["output_sqnr"] == pytest.approx(found["outputs"][0]["sqnr"], abs=1e-3)
    assert layers["excite"]["weight_sqnr"] is None  # infinite: equal
    _, out, _ = called(*arguments[:3], capsys=capsys)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("excite")] == ["equal"]
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    save(small_int8(), tmp_path / "net.onnx")
    status, out, _ = called("compare", folder / "net.pt2", tmp_path / "net.onnx", "--json", capsys=capsys)
    assert json.loads(out)["outputs"][0]["sqnr"] > 30
    assert json.loads(out)["layers"] == []


@pytest.mark.parametrize("name", ["net.pt2", "net.safetensors"])
def test_report(folder, tmp_path, capsys, name):
    x, _ = samples(16, seed=3)
    save_tensors({"x": x}, tmp_path / "x.safetensors")
    out, model = tmp_path / "report.html", ["--model", SMALL] if name == "net.safetensors" else []
    status, said, _ = called(
        "report", folder / name, out, *model, "--inputs", tmp_path / "x.safetensors", capsys=capsys
    )
    assert (status, str(out) in said) == (0, True)
    page = parse(out.read_text())
    assert len(page.find("table", class_="sortable")[0].find("tbody")[0].find("tr")) == 5
    assert page.text().count("Input: distribution on the grid") == 5
    if name == "net.pt2":
        assert "50.00\xa0%" in page.text()  # the accuracy that the file carries
    status, _, err = called("report", tmp_path / "net.onnx", out, capsys=capsys)
    assert (status, ".safetensors files can be looked into" in err) == (1, True)


def test_compare_refuses_what_cannot_be_compared(folder, tmp_path, capsys):
    save(encoder_int8()[0], tmp_path / "encoder.pt2")
    status, _, err = called("compare", folder / "net.pt2", tmp_path / "encoder.pt2", capsys=capsys)
    assert status == 1
    assert "encoder.pt2 does not take inputs of shape (16, 3, 8, 8)" in err
    save_tensors({"y": torch.zeros(2)}, tmp_path / "y.safetensors")
    arguments = ["compare", folder / "net.pt2", folder / "net.pt2", "--inputs", tmp_path / "y.safetensors"]
    assert "a tensor 'x' is needed" in called(*arguments, capsys=capsys)[2]


def loud(broken=False):
    sys.stdout.write("building ...")
    if broken:
        raise KeyError("weights")
    return small_int8_net()


def small_int8_net():
    from tests.export.nets import Small

    return Small()


def test_what_a_net_prints_is_not_in_the_output(folder, capsys):
    arguments = ["bench", folder / "net.pt2", "--rounds", 1, "--json", "--model", "tests.cli.test_cli.loud"]
    status, out, err = called(*arguments, capsys=capsys)
    assert status == 0
    assert len(json.loads(out)["results"]) == 2
    assert "building" in err
    status, out, err = called(*arguments, "broken=True", capsys=capsys)
    assert (status, out) == (1, "")
    assert "KeyError: 'weights'" in err
    with pytest.raises(Exception, match="KeyError"):
        main([*map(str, arguments), "broken=True", "--traceback"])


@pytest.mark.parametrize(
    "arguments", [["inspect", "none.pt2"], ["bench", "none.pt2"], ["compare", "none.pt2", "none.pt2"]]
)
def test_a_missing_file_is_one_line_on_stderr(arguments, capsys):
    status, out, err = called(*arguments, capsys=capsys)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "none.pt2" in err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["bench", "net.pt2", "--batch", "0"]])
def test_a_wrong_call_has_exit_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as found:
        main(arguments)
    assert found.value.code == 2
    assert "usage: qlightning" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "export", "bench", "compare", "report"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as found:
        main([command, "--help"])
    assert found.value.code == 0
    assert f"examples:\n  qlightning {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "net.pt2", "--backend", ""],
        ["compare", "net.pt2", "net.pt2", "--backend", ""],
        ["export", "net.pt2", "out.pt2", "--backend", ""],
        ["export", "net.pt2", "out.pt2", "--backend", "onednm"],
    ],
)
def test_a_backend_that_is_none_is_said(folder, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    paths = [folder / a if a == "net.pt2" else a for a in arguments]
    status, out, err = called(*paths, capsys=capsys)
    assert (status, out) == (1, "")
    assert f"Unknown backend {arguments[-1]!r}" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", ["", "1,x", "1," + "9" * 30, "-1,3", f"{2**40},{2**40}", ";"])
def test_sizes_that_are_none_are_said(folder, tmp_path, capsys, sizes):
    status, _, err = called("export", folder / "net.pt2", tmp_path / "a.pt2", f"--input={sizes}", capsys=capsys)
    assert status == 1
    assert "sizes are needed" in err


def test_a_batch_beyond_all_memory_is_said(folder, capsys):
    status, _, err = called("bench", folder / "net.pt2", "--batch", 2**31 - 1, capsys=capsys)
    assert status == 1
    assert "'x' of the shape (2147483647, 3, 8, 8) cannot be made" in err


def facts_of(checkpoint):
    return checkpoint["state_dict"]._metadata["net"]["qlightning"]


DAMAGES = {
    "no format": (lambda f: f.pop("format"), "in format None"),
    "no QConfig": (lambda f: f.pop("qconfig"), "qconfig is a NoneType"),
    "a scheme of other bits": (lambda f: f["qconfig"]["weight"].update(bits=99), "qconfig.weight: QScheme bits=99"),
    "no observer": (lambda f: f["qconfig"].update(weight_observer=1), "qconfig.weight_observer is a int"),
    "an unknown observer": (lambda f: f["qconfig"]["weight_observer"].update({"class": "a.B"}), "the observer a.B"),
    "another mode": (lambda f: f.update(mode="x"), "mode is 'x'"),
    "another backend": (lambda f: f.update(backend="x"), "Unknown backend 'x'"),
    "a pattern of nothing": (lambda f: f["qconfig"].update(exclude=["nothing"]), "'nothing' matches no module"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_facts_of_a_checkpoint_are_named(trained, tmp_path, capsys, damage, message):
    checkpoint = torch.load(trained[0], weights_only=True)
    damage(facts_of(checkpoint))
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    arguments = ["export", tmp_path / "bad.ckpt", tmp_path / "a.pt2", "--model", "tests.cli.test_cli.Net", "width=6"]
    status, out, err = called(*arguments, "--input", "1,3,8,8", capsys=capsys)
    assert (status, out) == (1, "")
    assert err.startswith(f"qlightning export: {tmp_path / 'bad.ckpt'}: ")
    assert message in err
    assert not (tmp_path / "a.pt2").exists()


def test_damaged_metadata_of_a_state_dict_is_said(trained, tmp_path, capsys):
    checkpoint = torch.load(trained[0], weights_only=True)
    for entry in (3, {"qlightning": 3}):
        checkpoint["state_dict"]._metadata["net"] = entry
        torch.save(checkpoint, tmp_path / "bad.ckpt")
        arguments = ["export", tmp_path / "bad.ckpt", tmp_path / "a.pt2", "--model", "tests.cli.test_cli.Net"]
        status, _, err = called(*arguments, "width=6", "--input", "1,3,8,8", capsys=capsys)
        assert status == 1
        assert f"{tmp_path / 'bad.ckpt'}: " in err
        assert "damaged" in err
