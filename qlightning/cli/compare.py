"""``qlightning compare``: how far two models are apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.affine import sqnr
from qlightning.cli import nets
from qlightning.cli.output import positive, shown
from qlightning.cli.runners import facts_of, loaded, runner
from qlightning.errors import ConfigError, QuantizationError
from qlightning.graph.programs import Captured
from qlightning.graph.recording import Int8Run
from qlightning.nn.quantized import QuantizedLayer
from qlightning.table import aligned
from qlightning.tensor_file import load_tensors

HELP = "say how far two models are apart, for each output and for each layer of the same name"
DESCRIPTION = """\
Runs two files on the same inputs and gives the signal-to-quantization-noise ratio (SQNR, in dB; B is taken for A with
noise) and the largest difference of each output. Where both are .pt2 or .safetensors, also of the weight and of the
result of each layer that both have, each layer with the inputs that it gets in its own model."""
EPILOG = """\
examples:
  qlightning compare net.pt2 net.onnx
  qlightning compare old.pt2 new.pt2 --inputs images.safetensors --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument("a", type=Path, help="the one file")
    parser.add_argument("b", type=Path, help="the other one")
    parser.add_argument(
        "--inputs", type=Path, help=".safetensors with a tensor for each input, by name (default: normal numbers)"
    )
    parser.add_argument("--batch", type=positive, default=16, help="how many random inputs (default: 16)")
    parser.add_argument("--model", nargs="+", metavar=("TARGET", "NAME=VALUE"), help=nets.MODEL_HELP)
    parser.add_argument("--backend", default="auto", help="what runs .pt2 and .safetensors (default: auto)")


def run(options: argparse.Namespace) -> str:
    """Runs the command, and returns what it has to say."""
    facts, _ = facts_of(options.a), facts_of(options.b)
    inputs = given(options.inputs, [spec.name for spec in facts.inputs]) if options.inputs else None
    inputs = inputs or nets.inputs_like(facts, options.batch if facts.inputs and facts.inputs[0].shape[0] < 0 else None)
    found = [_results(path, options, inputs) for path in (options.a, options.b)]
    outputs = list(_outputs(*found))
    layers: list[dict[str, Any]] = []
    if {options.a.suffix, options.b.suffix} <= {".pt2", ".safetensors"}:
        first, second = (loaded(path, options.model, options.backend) for path in (options.a, options.b))
        layers = list(_layers(first, second, inputs))
    return shown({"outputs": outputs, "layers": layers}, _text(outputs, layers), options.json)


def given(path: Path, names: list[str]) -> tuple[Tensor, ...]:
    """The inputs in a file, in the order of their names.

    Raises:
        ConfigError: One is missing.
    """
    tensors = load_tensors(path)
    if missing := [name for name in names if not isinstance(tensors.get(name), Tensor)]:
        raise ConfigError(f"{path} has {', '.join(tensors) or 'nothing'}; a tensor {missing[0]!r} is needed.")
    return tuple(tensors[name] for name in names)  # type: ignore[misc]


def _results(path: Path, options: argparse.Namespace, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    try:
        return runner(path, options.model, options.backend)(*inputs)
    except (QuantizationError, ImportError, OSError):
        raise
    except Exception as error:  # each runtime has errors of its own
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ConfigError(f"{path} does not take inputs of shape {shapes}: {error}") from error


def _outputs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each output; those of other runtimes have names of their own and count by their order."""
    if len(a) != len(b):
        raise ConfigError(f"The one gives {len(a)} tensors ({', '.join(a)}), the other {len(b)} ({', '.join(b)}).")
    for (name, x), y in zip(a.items(), b.values(), strict=True):
        if not x.numel():
            raise ConfigError(f"{name} is empty: nothing is to be compared.")
        if x.shape != y.shape:
            raise ConfigError(f"{name} is {tuple(x.shape)} in the one and {tuple(y.shape)} in the other.")
        row = {"name": name, "sqnr": sqnr(x, y), "max_difference": float((x.double() - y.double()).abs().max())}
        if x.dim() == 2 and x.is_floating_point():
            row["same_argmax"] = float((x.argmax(1) == y.argmax(1)).float().mean())
        yield row


def _layers(a: nn.Module, b: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[dict[str, Any]]:
    weights = [
        {n: m.weight().dequantize() for n, m in net.named_modules() if isinstance(m, QuantizedLayer)} for net in (a, b)
    ]
    results = [_layer_results(net, inputs) for net in (a, b)]
    for name, x in weights[0].items():
        y = weights[1].get(name)
        if y is None or x.shape != y.shape:
            continue
        row: dict[str, Any] = {"name": name, "weight_sqnr": sqnr(x, y)}
        if name in results[0] and name in results[1] and results[0][name].shape == results[1][name].shape:
            row["output_sqnr"] = sqnr(results[0][name], results[1][name])
        yield row


def _layer_results(net: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What each int8 layer of a model gives, in its QDQ form."""
    captured: Captured | None = net.__dict__.get("_captured")
    programs = [p for found in captured.programs.values() for p in found if p.qdq is not None] if captured else []
    fitting = (p.qdq for p in programs if sum(n.op == "placeholder" for n in p.qdq.nodes) == len(inputs))  # type: ignore[union-attr]
    graph = next(fitting, None)
    if graph is None:
        return {}
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        Int8Run(net, graph, found.__setitem__).run(*inputs)
    return found


def _text(outputs: list[dict[str, Any]], layers: list[dict[str, Any]]) -> str:
    rows = [
        (row["name"], _decibel(row["sqnr"]), f"{row['max_difference']:.4g}", _percent(row.get("same_argmax")))
        for row in outputs
    ]
    text = aligned(("output", "SQNR (dB)", "largest difference", "same answer"), rows)
    if layers:
        cells = [(row["name"], _decibel(row["weight_sqnr"]), _decibel(row.get("output_sqnr"))) for row in layers]
        text += "\n\n" + aligned(("layer", "SQNR of the weight (dB)", "of the result (dB)"), cells)
    return text


def _decibel(value: float | None) -> str:
    return "-" if value is None else "equal" if value == float("inf") else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
