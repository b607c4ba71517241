"""The QDQ form of an int8 model as a module of its own, which all exports read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qlightning.errors import ArtifactError, ConfigError
from qlightning.graph.bind import BoundModule
from qlightning.graph.programs import Captured, Example, Program
from qlightning.graph.signature import CallSpec, describe_call


@dataclass(frozen=True)
class QDQModule:
    """A float module between explicit quantize and dequantize calls.

    Attributes:
        module: Takes the tensors of a call, one after the other; float in, float out.
        names: The names of its inputs.
        example: Tensors like those of a call.
        call: The way of calling it stands for, in words.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    example: tuple[Tensor, ...]
    call: str


def qdq_module(int8: nn.Module, example_inputs: Any = None) -> QDQModule:
    """Gives the QDQ form of an int8 model.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        example_inputs: The arguments of a call: a tensor, a tuple of arguments or a dict of keyword arguments. None:
            like a call that it, or the model that it was made from, has seen.

    Raises:
        ConfigError: The model is not in int8 as a whole, or takes values that are no tensors.
        ArtifactError: No call is known, or none like the example.
    """
    captured: Captured | None = int8.__dict__.get("_captured") if isinstance(int8, BoundModule) else None
    if captured is None or not _is_int8(captured):
        bound = ((name, m) for name, m in int8.named_modules() if isinstance(m, BoundModule))
        parts = [name for name, module in bound if _is_int8(module.__dict__["_captured"])]
        raise ConfigError(f"{type(int8).__name__} is not one int8 graph{_advice(int8, parts)}")
    spec, program, example = _chosen(int8, captured, example_inputs)
    if spec.value_names:
        raise ConfigError(
            f"{type(int8).__name__}: {', '.join(sorted(spec.value_names))} is no tensor, and an exported graph takes "
            "tensors only. Pass it as a tensor, or make it an attribute of the model."
        )
    assert program.qdq is not None
    module = fx.GraphModule(int8, program.qdq, type(int8).__name__)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return QDQModule(module.eval(), tuple(spec.leaf_names), example, spec.describe())


def _advice(model: nn.Module, parts: list[str]) -> str:
    if len(parts) == 1:
        return f": its net {parts[0]!r} is. Save that: save(model.{parts[0]}, path)."
    if parts:
        return (
            f": Python code stands between its int8 parts ({', '.join(parts)}). Save these one by one, such as "
            f"save(model.{parts[0]}, path), or the whole as .safetensors; or change what keeps it from being traced."
        )
    prepared = [name for name, module in model.named_modules() if "_preparation" in vars(module)]
    if prepared and prepared[0]:
        return f". Convert its net first: save(convert(model.{prepared[0]}), path)."
    return ". Convert it first: convert(prepared) or quantize_model(model, batches)."


def with_free_batch(example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The example with a batch of two at least: torch.export takes a size of one for a constant."""
    return tuple(torch.cat([x, x])[:2] if x.dim() and x.shape[0] < 2 else x for x in example)


def _is_int8(captured: Captured) -> bool:
    return any(program.qdq is not None for _, program in _programs(captured))


def _programs(captured: Captured) -> Iterator[tuple[CallSpec, Program]]:
    return ((spec, p) for (spec, training), found in captured.programs.items() if not training for p in found)


def _chosen(int8: nn.Module, captured: Captured, example_inputs: Any) -> tuple[CallSpec, Program, tuple[Tensor, ...]]:
    fitting = [(spec, p) for spec, p in _programs(captured) if p.fits(int8)]
    if example_inputs is None:
        known = [(spec, p, p.example) for spec, p in fitting if p.example is not None]
        if not known:
            raise ArtifactError(
                f"{type(int8).__name__} was never called, so that the shapes of its inputs are not known: give "
                "example_inputs, such as torch.zeros(1, 3, 224, 224)."
            )
        spec, program, example = known[0]
        return spec, program, _zeros(example)
    args, kwargs = _arguments(example_inputs)
    try:
        spec, leaves = describe_call(captured.signature, args, kwargs)
    except TypeError as error:
        raise ConfigError(f"{type(int8).__name__} cannot be called with the example_inputs: {error}.") from error
    for known_spec, program in fitting:
        if known_spec == spec:
            return spec, program, tuple(leaves)
    raise ArtifactError(
        f"{type(int8).__name__} knows no call {spec.describe()}: it was converted for "
        f"{'; '.join(s.describe() for s, _ in fitting)}."
    )


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, dict):
        return (), example_inputs
    raise ConfigError(
        f"example_inputs={type(example_inputs).__name__}: a tensor, a tuple of arguments or a dict of keywords."
    )


def _zeros(example: Example) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in example)
