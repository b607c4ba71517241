"""``qlightning inspect``: what a file of an int8 model says."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from qlightning.cli.output import shown
from qlightning.export import READABLE, Metadata, metadata_of, parts_of
from qlightning.table import aligned

HELP = "say what is in a file: layers, schemes, inputs, versions, metrics"
DESCRIPTION = f"Says what a file of an int8 model ({', '.join(READABLE)}) holds. Nothing in it is executed."
EPILOG = """\
examples:
  qlightning inspect net.pt2
  qlightning inspect net.onnx --json | jq .metrics
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument("file", type=Path, help="the file")


def run(options: argparse.Namespace) -> str:
    """Runs the command, and returns what it has to say."""
    facts = metadata_of(options.file)
    size = sum(part.stat().st_size for part in parts_of(options.file))
    return shown(
        {"file": str(options.file), "bytes": size, **asdict(facts)}, _text(options.file, size, facts), options.json
    )


def _text(path: Path, size: int, facts: Metadata) -> str:
    layers = [
        (row.name or "(model)", row.kind, "int8" if row.int8 else "float", row.scheme or row.reason)
        for row in facts.layers
    ]
    entries = {
        "inputs": "; ".join(f"{i.name} {i.dtype} ({', '.join(map(_size, i.shape))})" for i in facts.inputs),
        "made for": f"backend {facts.backend}, CPU with {facts.cpu}" + _ranges(path, facts),
        "made by": f"{facts.mode}; " + ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "activations": facts.activation,
        "excluded": ", ".join(facts.exclude),
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in facts.metrics.items()),
        "classes": _shortened(facts.class_names),
        "made from": f"SHA-256 {facts.source_sha256}" if facts.source_sha256 else "",
    }
    head = f"{path}: {size / 1e6:.3f} MB, {sum(row.int8 for row in facts.layers)} of {len(facts.layers)} layers in int8"
    lines = [f"{name + ':':<13}{value}" for name, value in entries.items() if value]
    return "\n".join([head, *lines, "", aligned(("layer", "type", "runs in", "weight or reason"), layers)])


def _ranges(path: Path, facts: Metadata) -> str:
    if not facts.full_range:
        return ""
    elsewhere = path.suffix in (".onnx", ".xml")
    return ", full 8-bit ranges" + (" (wrong answers on x86 CPUs without VNNI or AMX)" if elsewhere else "")


def _size(size: int) -> str:
    return "free" if size < 0 else str(size)


def _shortened(names: tuple[str, ...], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
