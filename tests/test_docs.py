"""The documents do what they say: their code runs, their links exist, messages are those of the package."""

from __future__ import annotations

import ast
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = {"benchmarks", "accuracy"}  # by scripts, of figures alone
REFERENCE = [page for page in DOCS if page.parent.name == "api"]
WITH_CODE = [page for page in DOCS if page.stem not in WRITTEN and page not in REFERENCE]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    code = blocks("python", page.read_text())
    assert code
    for block in code:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_links_exist(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)", page.read_text()) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles}, link


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_the_reference_names_what_there_is(page: Path) -> None:
    found = re.findall(r"^::: ([\w.]+)", page.read_text(), flags=re.MULTILINE)
    assert found
    for path in found:
        assert pydoc.locate(path) is not None, path


def test_the_reference_has_every_public_name() -> None:
    import qlightning

    text = "\n".join(page.read_text() for page in REFERENCE)
    listed = set(re.findall(r"^::: qlightning\.(\w+)$", text, flags=re.MULTILINE))
    assert set(qlightning.__all__) - listed == {"__version__", "QuantizationError"}


def test_every_page_stands_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r": ([\w/-]+\.md)$", text, flags=re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert yaml.safe_load(text)["theme"]["font"] is False  # nothing that a reader's browser fetches from elsewhere


def _messages() -> list[str]:
    """The constant parts of every string of the package, parts of one string joined by a line break."""
    found = []
    for path in (ROOT / "qlightning").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("\n".join(str(v.value) for v in node.values if isinstance(v, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_of_the_troubleshooting_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    titles = re.findall(r"^### `(.*)`$", page, flags=re.MULTILINE)
    assert len(titles) > 20
    messages = _messages()
    for title in titles:
        parts = [part.strip() for part in title.split("...")]
        assert any(all(part in message for part in parts) for message in messages), title


def test_the_site_can_be_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr  # strict: a warning is an error
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(DOCS)
    assert "QuantizationAwareTraining" in (tmp_path / "site" / "api" / "models" / "index.html").read_text()
