"""``qlightning export``: from a checkpoint or a file of an int8 model to a file of another kind."""

from __future__ import annotations

import argparse
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qlightning.backends import resolve_backend
from qlightning.cli import nets
from qlightning.cli.output import shortened, shown
from qlightning.errors import ArtifactError, ConfigError, QuantizationError
from qlightning.export import SUFFIXES, load, parts_of, save
from qlightning.export.settings import read_settings
from qlightning.graph import convert, facts, prepare

HELP = "turn a checkpoint, or a file of an int8 model, into a file of another kind"
DESCRIPTION = f"""\
Writes the int8 model of SOURCE to OUT; the suffix of OUT says the kind of file: {", ".join(SUFFIXES)}.

SOURCE is a .pt2 file, a .safetensors file of an int8 model (with --model), or a checkpoint of a training with
QuantizationAwareTraining (with --model or --config, and --input). Nothing in these files is executed; --model and
--config name code of yours that is."""
EPILOG = """\
examples:
  qlightning export net.pt2 net.onnx
  qlightning export last.ckpt net.pt2 --model torchvision.models.resnet18 num_classes=10 --input 1,3,224,224
  qlightning export last.ckpt net.xml --config outputs/2026-01-01/12-00-00/config.yaml --input 1,3,32,32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument("source", type=Path, help="a checkpoint (.ckpt, .pt), a .pt2 or a .safetensors file")
    parser.add_argument("out", type=Path, help="the file to write")
    net = parser.add_mutually_exclusive_group()
    net.add_argument("--model", nargs="+", metavar=("TARGET", "NAME=VALUE"), help=nets.MODEL_HELP)
    net.add_argument("--config", type=Path, help="the config.yaml that the run of a recipe has left: has the net in it")
    parser.add_argument("--input", help="sizes of a call, such as 1,3,224,224; several inputs: 1,8;1,16")
    parser.add_argument("--part", help="the net in the checkpoint, where that has several, such as backbone")
    parser.add_argument("--backend", default=None, help="what a checkpoint is converted for; default: as it was made")


def run(options: argparse.Namespace) -> str:
    """Runs the command, and returns what it has to say."""
    if options.out.suffix not in SUFFIXES:
        raise ConfigError(f"{options.out}: the suffix says the kind of file; possible are {', '.join(SUFFIXES)}.")
    if options.source.suffix in SUFFIXES and options.source.suffix not in (".pt2", ".safetensors"):
        raise ConfigError(f"{options.source}: no other kind of file can be made of this kind; begin with a .pt2 file.")
    if not options.source.is_file():
        raise FileNotFoundError(f"{options.source}: no such file.")
    example = nets.example(options.input) if options.input is not None else None
    if options.backend is not None:
        resolve_backend(options.backend)
    if options.source.suffix in (".pt2", ".safetensors"):
        net = _net(options) if options.source.suffix == ".safetensors" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it runs on here, as it does not run
            int8 = load(options.source, net, backend="auto" if options.backend is None else options.backend)
        facts_of_file = save(int8, options.out, example_inputs=example)
    else:
        int8 = _converted(options)
        facts_of_file = save(int8, options.out, example_inputs=example, source=options.source)
    size = sum(part.stat().st_size for part in parts_of(options.out))
    text = f"{options.out}: {size / 1e6:.3f} MB, {sum(row.int8 for row in facts_of_file.layers)} layers in int8"
    return shown({"file": str(options.out), "bytes": size, **asdict(facts_of_file)}, text, options.json)


def _net(options: argparse.Namespace) -> nn.Module:
    if options.config is not None:
        return nets.from_config(options.config)
    if options.model is None:
        raise ConfigError(f"{options.source} has no code in it: name the float net by --model or --config.")
    return nets.build(options.model)


def _converted(options: argparse.Namespace) -> nn.Module:
    """The int8 model of a checkpoint."""
    state = _state_dict(options.source)
    parts = _parts(options.source, state)
    if not parts:
        raise ArtifactError(
            f"{options.source} is no checkpoint of QuantizationAwareTraining: it does not say how its net was "
            "prepared. Quantize the float net first."
        )
    name = options.part if options.part is not None else next(iter(parts))
    if name not in parts or (options.part is None and len(parts) > 1):
        known = ", ".join(repr(part) if part else "the whole" for part in parts)
        raise ConfigError(
            f"{options.source} has the nets {known}: choose one by --part."
            if len(parts) > 1
            else f"{options.source} has one net, {known}: leave out --part."
        )
    if options.input is None:
        raise ConfigError("--input is needed: a checkpoint does not say what shapes its net is called with.")
    net = _net(options)
    qconfig, backend, mode = read_settings(
        parts[name], f"{options.source}: the net {name!r}" if name else str(options.source)
    )
    try:
        prepared = prepare(net, qconfig, backend=backend if options.backend is None else options.backend, mode=mode)
        prepared.load_state_dict(_below(state, name))
    except QuantizationError as error:
        raise type(error)(f"{options.source}: {error}") from error
    except RuntimeError as error:
        place = f"self.{name}" if name else "the LightningModule"
        raise ArtifactError(
            f"{options.source} belongs to another net than {type(net).__name__}; name the one that {place} was in the "
            f"training, with its arguments. {shortened(str(error))}"
        ) from error
    return convert(prepared)


def _parts(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return facts.read(state)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path}: the metadata of its state dict is damaged: {error}.") from error


def _state_dict(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever damaged files lead to
        reason = str(error).rpartition("error: ")[2].strip().split("\n\n")[0]  # torch advises to execute it
        raise ArtifactError(
            f"{path} cannot be loaded without executing what is in it: {shortened(reason)}. Load it in a program of "
            "yours, and save its state dict by torch.save(model.state_dict(), path)."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(state, dict):
        raise ArtifactError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return state


def _below(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The part of a state dict below a name, with its metadata."""
    start = f"{name}." if name else ""
    part: OrderedDict[str, Any] = OrderedDict(
        (key[len(start) :], value) for key, value in state.items() if key.startswith(start)
    )
    metadata = getattr(state, "_metadata", {})
    part._metadata = {  # type: ignore[attr-defined]
        path[len(start) :]: entry for path, entry in metadata.items() if not name or f"{path}.".startswith(start)
    }
    return part
