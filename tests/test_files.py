"""Files are complete or not there, under the name that was given, and errors name it."""

import os

import pytest
import torch

from qlightning import load_tensors, quantize_model, save, save_tensors
from qlightning.files import check_target, written_whole


def write(path, text="new"):
    with written_whole(path) as temporary:
        assert os.path.dirname(temporary) == os.path.dirname(os.path.realpath(path))
        with open(temporary, "w") as file:
            file.write(text)


def test_an_interrupted_call_leaves_the_old_file_alone(tmp_path):
    write(tmp_path / "a.txt", "old")
    with pytest.raises(TypeError):
        write(tmp_path / "a.txt", 0)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "old").write_text("old")
    for name, target in (("a.pt2", "store/old"), ("b.pt2", "store/new"), ("c.pt2", "a.pt2")):
        (tmp_path / name).symlink_to(target)
        write(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "store" / "old").read_text() == "c.pt2"
    assert (tmp_path / "store" / "new").read_text() == "b.pt2"
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == ["new", "old"]


@pytest.mark.parametrize("name", ["x" * 255, "x" * 251 + ".pt2", "x." + "y" * 253])
def test_names_may_be_as_long_as_names_can_be(tmp_path, name):
    write(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("file/a.pt2", NotADirectoryError, "no folder"),
        ("folder.pt2", IsADirectoryError, "a folder has this name"),
        ("pipe.pt2", OSError, "no regular file"),
        ("loop.pt2", OSError, "no regular file"),
        ("closed/new/a.pt2", PermissionError, "no permission.*closed"),
        ("x" * 256 + ".pt2", OSError, "name too long"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_work(tmp_path, monkeypatch, name, error, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "closed").mkdir()
    os.mkfifo(tmp_path / "pipe.pt2")
    (tmp_path / "loop.pt2").symlink_to("loop.pt2")
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path))  # root may write anywhere
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=f"(?s){name} cannot be written: .*{reason}"):
        check_target(tmp_path / name)
    with pytest.raises(error, match=f"(?s){name} cannot be written: .*{reason}"):
        save("no model at all", tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_errors_of_the_system_name_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "/somewhere/.abc", None, "x")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"a\.pt2 cannot be written: No space left on device$"):
        write(tmp_path / "a.pt2")
    assert not list(tmp_path.iterdir())


def test_saved_models_and_tensors_go_through_links(tmp_path):
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.randn(8, 4)
    int8 = quantize_model(net, [x])
    for name in ("a.pt2", "a.safetensors"):
        (tmp_path / name).symlink_to(f"new/{'n' * 240}")
        save(int8, tmp_path / name)
        assert (tmp_path / name).is_symlink()
    (tmp_path / "t").symlink_to("tensors")
    save_tensors({"x": x}, tmp_path / "t")
    assert torch.equal(load_tensors(tmp_path / "tensors")["x"], x)
