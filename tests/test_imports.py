"""Imports go one way, and what is to be replaced one day is imported in one place."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import qlightning

PACKAGE = Path(qlightning.__file__).parent
# From the bottom to the top; a part imports what is below it, and itself.
LAYERS = (
    ("errors", "files", "single", "strict_json", "table", "version"),
    ("qscheme", "html"),
    ("blocks",),
    ("affine",),
    ("qparams", "lsq"),
    ("tensor", "observers"),
    ("tensor_file",),
    ("fake_quantize", "qconfig"),
    ("learned",),
    ("nn",),
    ("calls",),
    ("vocabulary",),
    ("backends",),
    ("graph", "functional"),
    ("steps",),
    ("export", "analysis"),
    ("quantization",),
    ("callbacks", "cli"),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    own = part_of(path)
    assert own in RANK, f"{own} has no place among the layers"
    for name in imported(path):
        if name.startswith("qlightning."):
            other = name.split(".")[1]
            assert other == own or RANK[other] < RANK[own], f"{path}: {own} imports {other}"


def test_torch_ao_is_imported_in_one_place() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.startswith(("torch.ao", "torch.quantization", "torchao")) for name in imported(path))
    }
    assert users == {"backends/qdq.py"}


def test_lightning_is_imported_by_the_callbacks_alone() -> None:
    users = {
        part_of(path)
        for path in FILES
        if any(name.split(".")[0] in ("pytorch_lightning", "lightning", "lightning_fabric") for name in imported(path))
    }
    assert users <= {"callbacks"}


def test_hydra_is_no_part_of_the_package() -> None:
    for path in FILES:
        assert not any(name.split(".")[0] in ("hydra", "omegaconf") for name in imported(path)), path


def test_the_core_does_not_load_lightning() -> None:
    code = "import qlightning.graph, qlightning.quantization, sys; print('pytorch_lightning' in sys.modules)"
    package = (
        "import types, sys; m = types.ModuleType('qlightning'); m.__path__ = [{!r}]; sys.modules['qlightning'] = m\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", package.format(str(PACKAGE)) + code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_public_names_are_explicit() -> None:
    assert qlightning.__all__ == sorted(qlightning.__all__)
    assert all(getattr(qlightning, name) is not None for name in qlightning.__all__)
    needed = {"Backend", "QConfig", "QScheme", "QuantizationError", "calibrate", "convert", "prepare", "quantize_model"}
    assert needed | {"unprepare"} <= set(qlightning.__all__)
