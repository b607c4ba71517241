"""The figures of the recipes' pages, written from the files that runs have left."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipes import metrics
from recipes.sweep import Run, collect

RESULTS = Path(__file__).parent / "results"
_BLOCK = re.compile(r"(<!-- figures: (\w+) (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_RUN = re.compile(r"(<!-- run: (\w+) -->\n).*?(<!-- end of run -->)", re.DOTALL)
_NETS = {
    "resnet20_cifar": "ResNet-20",
    "resnet56_cifar": "ResNet-56",
    "mobilenet_v2_cifar_half": "MobileNetV2, half width",
    "mobilenet_v3_cifar_half": "MobileNetV3-Large, half width",
}
_SEEDS = ("seed", "data.calibration_seed")
_COMMON = ("+recipe", "model", "model.weights", "data", "data.path", "backend", *_SEEDS)
_HIDDEN = ("+trainer.enable_progress_bar", "trainer.logger")


def keep(name: str, folders: Iterable[Path]) -> Path:
    """Writes the runs below some folders to ``results/NAME.json``, in place of the same runs that are there.

    Paths on the command line lose their folders, which are those of one machine.
    """
    path = RESULTS / f"{name}.json"
    runs = {_key(run): run for run in read(name)}
    for folder in folders:
        for run in collect(folder):
            overrides = {key: _basename(value) for key, value in run.overrides.items()}
            figures = {**run.metrics, "files": [_basename(file) for file in run.metrics.get("files", ())]}
            portable = Run({key: value for key, value in overrides.items() if key not in _HIDDEN}, figures)
            runs[_key(portable)] = portable
    content = [{"overrides": run.overrides, "metrics": run.metrics} for _, run in sorted(runs.items())]
    path.write_text(json.dumps({"runs": content}, indent=2) + "\n", encoding="utf-8")
    return path


def read(name: str) -> list[Run]:
    """Reads ``results/NAME.json``; no runs where there is no such file."""
    if not (RESULTS / f"{name}.json").exists():
        return []
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return [Run(run["overrides"], run["metrics"]) for run in content["runs"]]


def rendered(page: str) -> str:
    """Writes the figures of a page anew.

    They stand between ``<!-- figures: NAME RECIPE -->``, for the runs of a recipe in ``results/NAME.json``, or
    ``<!-- run: RECIPE -->``, for the one in ``results/RECIPE.json``, and the end of that.
    """
    page = _RUN.sub(lambda found: f"{found[1]}{_run(found[2])}{found[3]}", page)
    return _BLOCK.sub(lambda found: f"{found[1]}{_figures(found[2], found[3])}{found[4]}", page)


def _run(recipe: str) -> str:
    result = json.loads((RESULTS / f"{recipe}.json").read_text(encoding="utf-8"))
    table = _table(metrics.HEADER, metrics.rows(result))
    versions = result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "torchvision", "pytorch-lightning"))
    machine = f"{versions['cpu']}, {versions['threads']} threads"
    layers = f"{result['int8_layers']} layers in int8, {result['float_layers']} in float."
    return f"{table}\n\n{layers} The run took {result['seconds']:.0f} s ({machine}; {packages}).\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def _figures(name: str, recipe: str) -> str:
    runs = [run for run in read(name) if run.overrides["+recipe"] == recipe]
    if not runs:
        return "Not run yet: no figures.\n"
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_command(run, seeds=False), []).append(run)
    if recipe.endswith("float"):
        head: Sequence[str] = ("net", "accuracy", "size (MB)", "minutes")
        lines = [_float_row(run) for run in runs]
    else:
        head = (
            "net",
            "backend",
            "float",
            "int8: mean",
            "least to most",
            "mean less float",
            "size (MB)",
            "latency (ms)",
            "with",
        )
        lines = [_row(group) for group in groups.values()]
    commands = "\n".join(_command_of(group) for group in groups.values())
    return f"{_table(head, lines)}\n\n{_conditions(runs)}\n\n```sh\n{commands}\n```\n"


def _float_row(run: Run) -> Sequence[str]:
    figures = run.metrics["float"]
    return (
        _net(run),
        metrics.percent(figures["accuracy"]),
        f"{figures['size_mb']:.2f}",
        f"{run.metrics['seconds'] / 60:.0f}",
    )


def _row(group: Sequence[Run]) -> Sequence[str]:
    floats = [run.metrics["float"] for run in group]
    int8 = [run.metrics["int8"] for run in group]
    found = [figures["accuracy"] for figures in int8]
    mean, base = statistics.mean(found), statistics.mean(figures["accuracy"] for figures in floats)
    spread = (
        f"{metrics.percent(min(found))} to {metrics.percent(max(found))} ({len(found)})"
        if len(found) > 1
        else "one run"
    )
    pairs = (
        " → ".join(f"{statistics.median(figures[key] for figures in kind):.2f}" for kind in (floats, int8))
        for key in ("size_mb", "latency_ms")
    )
    drop = f"{100 * (mean - base):+.2f}"
    settings = [f"{key}={value}" for key, value in group[0].overrides.items() if key not in _COMMON]
    found_by = (metrics.percent(base), metrics.percent(mean), spread, drop)
    return (_net(group[0]), int8[0]["backend"], *found_by, *pairs, ", ".join(settings) or "-")


def _conditions(runs: Sequence[Run]) -> str:
    found = [run.metrics["versions"] for run in runs]
    return "; ".join(
        f"{key} {', '.join(sorted({str(versions[key]) for versions in found}))}" for key in ("torch", "cpu", "threads")
    )


def _command_of(group: Sequence[Run]) -> str:
    """The command that gives all runs of a group: a sweep over the seeds where there are several."""
    words = []
    for key, value in group[0].overrides.items():
        values = list(dict.fromkeys(run.overrides[key] for run in group)) if key in _SEEDS else [value]
        words.append(f"{key}={','.join(values)}")
    return f"python scripts/train.py {'-m ' if len(group) > 1 else ''}{' '.join(words)}"


def _command(run: Run, seeds: bool) -> str:
    return " ".join(f"{key}={value}" for key, value in run.overrides.items() if seeds or key not in _SEEDS)


def _key(run: Run) -> str:
    return _command(run, seeds=True)


def _net(run: Run) -> str:
    recipe = run.overrides["+recipe"]
    default = "resnet20_cifar" if recipe.startswith("resnet") else "mobilenet_v2_cifar_half"
    return _NETS[run.overrides.get("model", default)]


def _basename(value: str) -> str:
    return Path(value).name if "/" in value else value
