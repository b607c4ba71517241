"""Metadata: what a file says about the int8 model in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from qlightning.backends.base import cpu_features
from qlightning.errors import ArtifactError, ConfigError
from qlightning.graph.qdq_module import QDQModule
from qlightning.graph.report import report
from qlightning.strict_json import parse
from qlightning.version import __version__

FORMAT = 1
KEY = "qlightning"
MAX_LENGTH = 2**24
"""Characters of JSON that are read at most: some hundred times what a net of a thousand layers has."""
MAX_INPUTS = 1_000
MAX_DIMS = 64
MAX_NUMBERS = 2**30
"""Numbers that the example of an input may have, as inputs like it are made to save and to time a model."""
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
"""The dtypes that tensors in files may have."""


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name that a file gives.

    Raises:
        ValueError: It is none that tensors in files have.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}")
    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    Attributes:
        name: Its name.
        shape: Its sizes; -1 for those that are free.
        dtype: As torch spells it, without ``torch.``.
        example: Its sizes in a call that was seen.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    example: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model.

    Attributes:
        name: Its name.
        kind: The type of the float layer.
        int8: Whether it runs in int8.
        scheme: The grid of its weight, in words; empty for float.
        reason: Why it stays float; empty for int8.
    """

    name: str
    kind: str
    int8: bool
    scheme: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Metadata:
    """Plain facts about an int8 model, kept in each file that it is saved to, as JSON.

    Attributes:
        backend: What it was made for.
        cpu: The vector instructions of the machine that made it.
        activation: The grid of the activations, in words.
        inputs: What it takes.
        layers: Its layers.
        exclude: The patterns that were to stay float.
        mode: "qat" or "ptq".
        full_range: Whether activations and weights both have full 8-bit ranges, on which some CPUs saturate.
        versions: Of the libraries that made it.
        source_sha256: Of the checkpoint that it was made from, or empty.
        metrics: What was measured, by name.
        class_names: Of the outputs, or empty.
        format: Of these facts.
    """

    backend: str
    cpu: str
    activation: str
    inputs: tuple[InputSpec, ...]
    layers: tuple[LayerSpec, ...]
    exclude: tuple[str, ...] = ()
    mode: str = ""
    full_range: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    source_sha256: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    format: int = FORMAT

    def to_json(self) -> str:
        """The facts as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: Any, where: str) -> Metadata:
        """Reads facts, and checks that they are such.

        Args:
            text: The JSON, as str or bytes.
            where: The file, for messages.

        Raises:
            ArtifactError: They are damaged, or of another format.
        """
        if not isinstance(text, (str, bytes)) or len(text) > MAX_LENGTH:
            raise ArtifactError(f"{where}: there is no metadata of qlightning in it, or far too much.")
        try:
            found = parse(text)
        except ValueError as error:
            raise ArtifactError(f"{where}: its metadata is no JSON: {error}.") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            version = found.get("format") if isinstance(found, dict) else None
            raise ArtifactError(
                f"{where} has format {version!r} of the metadata; this qlightning ({__version__}) reads {FORMAT}."
            )
        try:
            return cls(**_checked(found))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ArtifactError(f"{where}: its metadata is damaged: {error}.") from error


class Notes(TypedDict, total=False):
    """What a file is to say beside what the model itself says.

    Attributes:
        metrics: Numbers by name.
        class_names: Names of the outputs.
        source: The checkpoint that the model was made from; its SHA-256 is kept.
    """

    metrics: Mapping[str, float] | None
    class_names: Sequence[str] | None
    source: str | Path | None


def input_specs(qdq: QDQModule, free: Sequence[Sequence[int]]) -> tuple[InputSpec, ...]:
    """What a model takes.

    Args:
        qdq: Its QDQ form.
        free: For each input the dimensions whose sizes are free.
    """
    return tuple(
        InputSpec(
            name, tuple(-1 if d in sizes else size for d, size in enumerate(x.shape)), str(x.dtype)[6:], tuple(x.shape)
        )
        for name, x, sizes in zip(qdq.names, qdq.example, free, strict=True)
    )


def collect(int8: nn.Module, inputs: tuple[InputSpec, ...], **notes: Unpack[Notes]) -> Metadata:
    """Gathers the facts about an int8 model.

    Args:
        int8: The model.
        inputs: What it takes.
        notes: What else the file is to say.

    Raises:
        ConfigError: A metric is no finite number, or a class name no string.
        ArtifactError: There is more than a file can carry.
    """
    source = notes.get("source")
    given: dict[str, Any] = {
        "inputs": inputs,
        "cpu": cpu_features(),
        "versions": {"qlightning": __version__, "torch": str(torch.__version__)},
        "metrics": _metrics(notes.get("metrics")),
        "class_names": _class_names(notes.get("class_names")),
        "source_sha256": "" if source is None else sha256(source),
    }
    found = report(int8)
    stored = int8.__dict__.get("metadata")
    if isinstance(stored, Metadata):  # of a model that was loaded from a file
        given = {name: value for name, value in given.items() if value}
        return _readable(replace(stored, backend=found.backend, **given), int8)
    preparation = int8.__dict__["_preparation"]
    configs = list(preparation.qconfig.all())
    collected = Metadata(
        backend=found.backend,
        activation=found.activation,
        layers=tuple(LayerSpec(r.name, r.kind, r.int8, r.scheme if r.int8 else "", r.reason) for r in found.layers),
        exclude=tuple(str(pattern) for pattern in preparation.qconfig.exclude),
        mode=preparation.mode,
        full_range=any(a.activation.bits == 8 and w.weight.bits == 8 for a in configs for w in configs),
        **given,
    )
    return _readable(collected, int8)


def _readable(found: Metadata, int8: nn.Module) -> Metadata:
    """The facts, once it is clear that they can be read again."""
    Metadata.from_json(found.to_json(), type(int8).__name__)
    return found


def _metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, (Mapping, type(None))):
        raise ConfigError(f"metrics={metrics!r}: numbers by name are needed, such as {{'accuracy': 0.91}}.")
    return {name: _metric(name, value) for name, value in (metrics or {}).items()}


def _metric(name: Any, value: Any) -> float:
    """The number of a Python, numpy or torch scalar."""
    try:
        if not isinstance(name, str) or isinstance(value, (bool, str, bytes)):
            raise TypeError
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"metrics[{name!r}]={value!r}: numbers by name are needed, such as {{'accuracy': 0.91}}."
        ) from error
    if not math.isfinite(number):
        raise ConfigError(f"metrics[{name!r}]={value!r}: a finite number is needed; leave it out.")
    return number


def _class_names(names: Any) -> tuple[str, ...]:
    if isinstance(names, (str, bytes)) or not isinstance(names, (Iterable, type(None))):
        raise ConfigError(f"class_names={names!r}: a list of strings is needed, such as ['cat', 'dog'].")
    listed = () if names is None else tuple(names)
    if other := [name for name in listed if not isinstance(name, str)]:
        raise ConfigError(f"class_names: strings are needed, got {other[0]!r}.")
    return tuple(map(str, listed))  # numpy has a string of its own


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits.

    Raises:
        FileNotFoundError: There is none.
    """
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


_STRINGS = ("backend", "cpu", "activation", "mode", "source_sha256")


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Metadata in their types.

    Raises:
        TypeError, ValueError, KeyError: They have others.
    """
    if unknown := found.keys() - {f.name for f in fields(Metadata)}:
        raise KeyError(f"unknown {sorted(unknown)[0]!r}")
    strings = {name: _is(found[name], str, name) for name in _STRINGS if name in found}
    lists: dict[str, Any] = {
        name: tuple(_texts(found[name], name)) for name in ("exclude", "class_names") if name in found
    }
    versions: dict[str, str] = _is(found.get("versions", {}), dict, "versions")
    _texts(list(versions.values()), "versions")
    metrics = {name: _number(value, name) for name, value in _is(found.get("metrics", {}), dict, "metrics").items()}
    inputs = tuple(_input(entry) for entry in _is(found["inputs"], list, "inputs"))
    if len(inputs) > MAX_INPUTS or len({spec.name for spec in inputs}) < len(inputs):
        raise ValueError(f"inputs: up to {MAX_INPUTS} are possible, none twice")
    layers = tuple(_layer(entry) for entry in _is(found["layers"], list, "layers"))
    _is(found.get("full_range", False), bool, "full_range")
    return {
        **found,
        **strings,
        **lists,
        "versions": versions,
        "metrics": metrics,
        "inputs": inputs,
        "layers": layers,
    }


def _input(entry: Any) -> InputSpec:
    name = _is(entry["name"], str, "the name of an input")
    if not name.isidentifier():
        raise ValueError(f"the input {name[:100]!r} has no usable name")
    shape, example = (_sizes(entry[key], f"{key} of the input {name[:100]!r}") for key in ("shape", "example"))
    if len(shape) != len(example) or any(size not in (-1, seen) for size, seen in zip(shape, example, strict=True)):
        raise ValueError(f"the input {name[:100]!r} has the shape {shape} and the example {example}")
    if min(example, default=0) < 0 or math.prod(max(size, 1) for size in example) > MAX_NUMBERS:
        raise ValueError(f"the input {name[:100]!r} has the sizes {example}; {MAX_NUMBERS} numbers are possible")
    dtype_of(entry["dtype"])
    return InputSpec(name, shape, entry["dtype"], example)


def _sizes(values: Any, what: str) -> tuple[int, ...]:
    if len(_is(values, list, what)) > MAX_DIMS:
        raise ValueError(f"{what}: {len(values)} dimensions")
    return tuple(_is(value, int, what) for value in values)


def _layer(entry: Any) -> LayerSpec:
    texts = {name: _is(entry[name], str, f"{name} of a layer") for name in ("name", "kind", "scheme", "reason")}
    return LayerSpec(int8=_is(entry["int8"], bool, "int8 of a layer"), **texts)


def _texts(values: Any, what: str) -> list[str]:
    return [_is(value, str, what) for value in _is(values, list, what)]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"the metric {what[:100]!r} is no number")
    return float(value)


def _is(value: Any, kind: type, what: str) -> Any:
    """The value, which has to be of a kind, and no flag where a number is needed."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{what} is a {type(value).__name__}")
    return value
