"""Files with full 8-bit ranges, whose runtimes saturate on CPUs without VNNI: said where they would, and only there."""

import platform
import warnings

import pytest
import torch
from torch import nn

from qlightning import QConfig, load, quantize_model, save
from qlightning.backends import base
from qlightning.cli import main
from qlightning.export import metadata_of

pytest.importorskip("onnxscript")
MESSAGE = "full 8-bit activations and weights. On this CPU .* saturate"


def int8_model(qconfig=None):
    torch.manual_seed(0)
    return quantize_model(
        nn.Sequential(nn.Linear(8, 4)), [torch.randn(16, 8)], qconfig=qconfig or QConfig(), backend="reference"
    )


@pytest.fixture
def old_cpu(monkeypatch):
    monkeypatch.setattr(base, "cpu_has_int8_dot_products", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def new_cpu(monkeypatch):
    monkeypatch.setattr(base, "cpu_has_int8_dot_products", lambda: True)


SUFFIXES = [".onnx", pytest.param(".xml", marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"))]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_saving_on_such_a_cpu_warns(tmp_path, old_cpu, suffix):
    if suffix == ".xml":
        pytest.importorskip("openvino")
    with pytest.warns(UserWarning, match=rf"net\{suffix} has {MESSAGE}") as found:
        save(int8_model(), tmp_path / f"net{suffix}")
    assert [warning.filename for warning in found if "saturate" in str(warning.message)] == [__file__]
    assert metadata_of(tmp_path / f"net{suffix}").full_range


def test_nothing_is_said_where_nothing_is_wrong(tmp_path, new_cpu, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        save(int8_model(), tmp_path / "net.onnx")  # another CPU may be wrong, which the file says
        assert metadata_of(tmp_path / "net.onnx").full_range
        monkeypatch.setattr(base, "cpu_has_int8_dot_products", lambda: False)
        save(int8_model(), tmp_path / "net.pt2")  # the backends here know
        save(int8_model(QConfig(weight=QConfig().weight.reduced())), tmp_path / "seven.onnx")
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        save(int8_model(), tmp_path / "arm.onnx")


@pytest.fixture
def full(tmp_path, new_cpu):
    save(int8_model(), tmp_path / "net.pt2")
    save(int8_model(), tmp_path / "net.onnx")
    return tmp_path / "net.pt2", tmp_path / "net.onnx"


@pytest.mark.parametrize("command", ["export", "bench", "compare"])
def test_the_command_line_says_it_on_stderr(full, monkeypatch, capsys, command):
    pytest.importorskip("onnxruntime")
    arguments = {
        "export": ["export", full[0], full[0].with_name("out.onnx")],
        "bench": ["bench", *full, "--rounds", 1],
        "compare": ["compare", *full],
    }[command]
    assert main([*map(str, arguments)]) == 0
    assert "saturate" not in capsys.readouterr().err
    monkeypatch.setattr(base, "cpu_has_int8_dot_products", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert main([*map(str, arguments)]) == 0
    assert capsys.readouterr().err.count("saturate on them") == 1


def test_inspect_says_it_of_files_for_other_runtimes(full, capsys):
    for path, said in zip(full, (False, True), strict=True):
        assert main(["inspect", str(path)]) == 0
        out = capsys.readouterr().out
        assert "full 8-bit ranges" in out
        assert ("without VNNI or AMX" in out) == said


def test_the_models_here_are_right_anyway(full, old_cpu):
    x = torch.randn(4, 8)
    assert torch.equal(load(full[0], backend="reference")(x), int8_model()(x))
