"""The C++ programs of docs/deployment-cpp.md compile, run and print the logits of the int8 model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "deployment-cpp.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_programs_print_the_logits(tmp_path):
    for tool in ("g++", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    pytest.importorskip("openvino")
    (model,), (package,) = blocks("python"), blocks("text")
    for name, content in zip(("with_openvino.cpp", "with_aoti.cpp"), blocks("cpp"), strict=True):
        (tmp_path / name).write_text(content)
    (tmp_path / "CMakeLists.txt").write_text(*blocks("cmake"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}

    def output(*command):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    expected = [float(line) for line in output(sys.executable, "-c", model).splitlines()]
    output(sys.executable, "-c", package)
    printed = "".join(output("bash", "-ec", block) for block in blocks("sh"))
    runs = re.findall(r"((?:^-?[\d.e-]+\n){10})class (\d+)\n", printed, flags=re.MULTILINE)
    assert len(runs) == 3
    for logits, best in runs:
        assert [float(line) for line in logits.split()] == pytest.approx(expected, abs=1e-5)
        assert int(best) == expected.index(max(expected))
