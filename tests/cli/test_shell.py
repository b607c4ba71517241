"""The command line among other programs: pipes, closed streams, other characters, interrupts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qlightning
import qlightning_command
from qlightning import save
from qlightning.cli import main
from tests.export.nets import small_int8

ROOT = Path(qlightning.__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def int8():
    return small_int8()


INSPECT = f"{sys.executable} -m qlightning inspect net.pt2"


@pytest.mark.parametrize(
    ("command", "status", "out", "err"),
    [
        (f"{INSPECT} | head -1", 0, "5 of 5 layers in int8", ""),
        (f"{INSPECT} | true", 0, "", ""),
        (f"{sys.executable} -m qlightning --help | true", 0, "", ""),
        (f"{INSPECT} >&-", 0, "", ""),
        (f"{INSPECT} 2>&-", 0, "5 of 5 layers in int8", ""),
        (f"{INSPECT.replace('net', 'none')} 2>&-", 1, "", ""),
        (f"{INSPECT} >/dev/full", 1, "", "qlightning inspect: [Errno 28] No space left on device\n"),
        (f"{INSPECT.replace('inspect', 'bench')} --rounds 1 >&- 2>&-", 0, "", ""),
        (f"PYTHONIOENCODING=ascii {INSPECT}", 0, r"gr\xfcn", ""),
    ],
)
def test_in_a_shell(tmp_path, int8, command, status, out, err):
    """A reader that leaves early is no error, nor is a closed stream, or one that does not take all characters."""
    save(int8, tmp_path / "net.pt2", class_names=["grün"])
    found = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=ENV
    )
    assert (found.returncode, found.stderr) == (status, err)
    assert out in found.stdout


def test_what_a_terminal_would_act_on_is_spelled_out(tmp_path, int8, capsys):
    save(int8, tmp_path / "net.pt2", class_names=["\x1b[31mred", "a\u202eb", "c\rd"])
    assert main(["inspect", str(tmp_path / "net.pt2")]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31mred, a\u202eb, c\rd" in out


def test_an_interrupted_import_has_its_exit_status(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    code = "import sys; from qlightning_command import main; sys.exit(main())"
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "qlightning: interrupted.\n")


def test_an_interrupted_command_has_its_exit_status(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("qlightning.cli.inspect.run", interrupted)
    assert main(["inspect", "net.pt2"]) == 130
    assert capsys.readouterr() == ("", "qlightning: interrupted.\n")


def test_the_script_is_the_command_line(tmp_path, int8, monkeypatch, capsys):
    save(int8, tmp_path / "net.pt2")
    monkeypatch.setattr(sys, "argv", ["qlightning", "inspect", str(tmp_path / "net.pt2")])
    assert qlightning_command.main() == 0
    assert "5 of 5 layers in int8" in capsys.readouterr().out
