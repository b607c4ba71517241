"""Tensors in safetensors files: there and back, and what is wrong with other files."""

import json

import pytest
import torch

from qlightning import QScheme, load_tensors, quantize, quantize_per_channel, save_tensors
from qlightning.errors import ArtifactError, ConfigError

safetensors = pytest.importorskip("safetensors.torch")


def tensors():
    x = torch.randn(4, 3, 2)
    shared = torch.randn(5)
    return {
        "plain": torch.randn(2, 2),
        "half": torch.randn(3).half(),
        "view": shared[1:3],
        "shared": shared,
        "net.conv": quantize_per_channel(x, torch.rand(3) + 0.1, torch.arange(3), 1),
        "net.fc": quantize(x, 0.1, 3, QScheme(bits=4, signed=False)),
        "moved": quantize(x, 0.1, 3).permute(2, 0, 1),
        "empty": quantize(torch.zeros(0, 3), 0.1, 3),
    }


def test_what_is_saved_is_loaded_bit_equal(tmp_path):
    saved = tensors()
    save_tensors(saved, tmp_path / "t.safetensors")
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert loaded[name].dtype == value.dtype
            assert torch.equal(loaded[name], value)
        else:
            assert loaded[name] == value


def test_files_of_others_give_their_tensors(tmp_path):
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(load_tensors(tmp_path / "a.safetensors")["a"], torch.ones(2))


def test_names_that_clash_and_other_values_are_errors_that_write_nothing(tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(ConfigError, match=r"a\.scale"):
        save_tensors({"a": quantize(torch.ones(1), 0.1, 0), "a.scale": torch.ones(1)}, path)
    with pytest.raises(ConfigError, match="b: a Tensor"):
        save_tensors({"b": 3}, path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.safetensors"
    save_tensors({"a": torch.ones(2)}, path)
    before = path.read_bytes()

    def broken(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        save_tensors({"a": torch.zeros(2)}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_files_are_typed_errors(tmp_path):
    path = tmp_path / "t.safetensors"
    save_tensors({"q": quantize(torch.ones(3), 0.1, 0)}, path)
    whole = path.read_bytes()
    for broken in (b"", whole[:5], whole[:-1], whole[:60], b"\xff" * 8 + whole[8:], b"PK" + whole):
        path.write_bytes(broken)
        with pytest.raises(ArtifactError, match=r"t\.safetensors"):
            load_tensors(path)
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "metadata",
    [
        "no json",
        "[]",
        json.dumps({"format": 99, "schemes": {}}),
        json.dumps({"format": 1}),
        json.dumps({"format": 1, "schemes": {"missing": {}}}),
        json.dumps({"format": 1, "schemes": {"q": {"bits": 99}}}),
        json.dumps({"format": 1, "schemes": {"q": {"axis": 7}}}),
        json.dumps({"format": 1, "schemes": {"q": {"signed": False}}}),
        json.dumps({"format": 1, "schemes": {"q": {"unknown": 1}}}),
        json.dumps({"format": 1, "schemes": {"q": []}}),
    ],
)
def test_metadata_that_does_not_fit_is_a_typed_error(tmp_path, metadata):
    path = tmp_path / "t.safetensors"
    q = quantize(torch.ones(3), 0.1, 0)
    parts = {"q.codes": q.codes, "q.scale": q.scale, "q.zero_point": q.zero_point}
    safetensors.save_file(parts, path, {"qlightning.tensors": metadata})
    with pytest.raises(ArtifactError):
        load_tensors(path)
