"""``qlightning report``: the report on the model in a file, as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from qlightning.cli import nets
from qlightning.cli.compare import given
from qlightning.cli.output import shown
from qlightning.cli.runners import facts_of, loaded
from qlightning.errors import ConfigError
from qlightning.graph.report import report

HELP = "write what is known of the layers of a model as one HTML page"
DESCRIPTION = """\
Writes a page with the layers of the int8 model in a .pt2 or .safetensors file: what runs in int8 and why not, and
how the codes of the weights are used; with --inputs those of the activations, too."""
EPILOG = """\
examples:
  qlightning report net.pt2 report.html
  qlightning report net.pt2 report.html --inputs images.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument("file", type=Path, help="the file of the model")
    parser.add_argument("out", type=Path, help="the page to write (.html)")
    parser.add_argument("--inputs", type=Path, help=".safetensors with a tensor for each input, by name")
    parser.add_argument("--model", nargs="+", metavar=("TARGET", "NAME=VALUE"), help=nets.MODEL_HELP)
    parser.add_argument("--backend", default="auto", help="what runs the model (default: auto)")


def run(options: argparse.Namespace) -> str:
    """Runs the command, and returns what it has to say."""
    if options.file.suffix not in (".pt2", ".safetensors"):
        raise ConfigError(f"{options.file}: the layers of .pt2 and .safetensors files can be looked into.")
    facts = facts_of(options.file)
    data = [given(options.inputs, [spec.name for spec in facts.inputs])] if options.inputs else None
    net = loaded(options.file, options.model, options.backend)
    figures = {"int8": dict(facts.metrics)} if facts.metrics else None
    path = report(net).save(options.out, data=data, figures=figures)
    size = path.stat().st_size
    return shown({"file": str(path), "bytes": size}, f"{path}: {size / 1e6:.3f} MB", options.json)
