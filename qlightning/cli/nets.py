"""Float nets that users name on the command line."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.errors import ConfigError, closest
from qlightning.export import Metadata

MODEL_HELP = (
    "the float net: the dotted path of a class or function, which is imported and called, and its keyword arguments, "
    "such as torchvision.models.resnet18 num_classes=10"
)


def build(target: Sequence[str]) -> nn.Module:
    """Builds a net.

    Args:
        target: The dotted path of a class or function, and ``name=value`` for each argument; values are read as Python
            literals, else as texts.

    Raises:
        ConfigError: There is no such thing, or it does not take the arguments, or gives no module.
    """
    path, *pairs = target
    return _built(path, dict(_argument(pair) for pair in pairs), f"--model {' '.join(target)}")


def from_config(path: Path) -> nn.Module:
    """Builds the net of a recipe from the ``config.yaml`` that its run has left; without its weights.

    Raises:
        ConfigError: It has no ``model`` with a ``_target_``, or that cannot be built.
        FileNotFoundError: There is no file.
    """
    import yaml  # which comes with Lightning

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("_target_"), str):
        raise ConfigError(f"{path}: it has no model with a _target_; the config.yaml of a recipe's run is needed.")
    arguments = {name: value for name, value in model.items() if name != "_target_"}
    return _built(model["_target_"], {**arguments, "weights": None}, f"{path}: model {model['_target_']}")


def _built(path: str, arguments: Mapping[str, Any], where: str) -> nn.Module:
    made = _found(path, where)
    try:
        net = made(**arguments)
    except Exception as error:  # whatever code of others raises
        raise ConfigError(f"{where}: {type(error).__name__}: {error}.") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{where} gives a {type(net).__name__}, not a torch.nn.Module.")
    return net.eval()


def example(text: str) -> tuple[Tensor, ...]:
    """Zeros of the shapes of a call, such as ``1,3,224,224``; those of several inputs are separated by ``;``.

    Raises:
        ConfigError: It is no list of sizes.
    """
    try:
        return tuple(torch.zeros([int(size) for size in shape.split(",")]) for shape in text.split(";"))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"--input {text!r}: sizes are needed, such as 1,3,224,224.") from error


def inputs_like(facts: Metadata, batch: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    """Random inputs of the kinds that a model takes: normal numbers, or zeros and ones for integers.

    Args:
        facts: The facts of the model.
        batch: The free first size; None: that of the example.
        seed: Of the random numbers.

    Raises:
        ConfigError: It is not known what the model takes, or its batch size is not free, or there is no memory for it.
    """
    if not facts.inputs:
        raise ConfigError("The file does not say what the model takes, as it is no single graph.")
    generator = torch.Generator().manual_seed(seed)
    made = []
    for spec in facts.inputs:
        shape = list(spec.example)
        if batch is not None and shape:
            if spec.shape[0] >= 0 and batch != shape[0]:
                raise ConfigError(f"The input {spec.name!r} has a batch size of {shape[0]} for good.")
            shape[0] = batch
        dtype = getattr(torch, spec.dtype)
        try:
            if dtype.is_floating_point:
                made.append(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
            else:
                made.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
        except RuntimeError as error:
            raise ConfigError(f"An input {spec.name!r} of the shape {tuple(shape)} cannot be made: {error}") from error
    return tuple(made)


def _found(path: str, where: str) -> Any:
    module, _, name = path.rpartition(".")
    sys.path.insert(0, str(Path.cwd()))  # of a script, this is its folder and not that of the user
    try:
        parent = importlib.import_module(module) if module else None
    except Exception as error:  # whatever code of others raises as it is imported
        raise ConfigError(f"{where}: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
    if parent is None or not hasattr(parent, name):
        hint = closest(name, dir(parent)) if parent is not None else " A dotted path is needed."
        raise ConfigError(f"{where}: there is no {name!r} in {module or 'it'}.{hint}")
    return getattr(parent, name)


def _argument(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--model: {pair!r} is no argument; name=value is needed.")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text
