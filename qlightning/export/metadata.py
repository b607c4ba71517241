"""Metadata: what a file says about the int8 model in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from typing_extensions import Unpack

from qlightning.backends.base import cpu_features
from qlightning.errors import ArtifactError, ConfigError
from qlightning.graph.qdq_module import QDQModule
from qlightning.graph.report import report
from qlightning.version import __version__

FORMAT = 1
KEY = "qlightning"
MAX_LENGTH = 2**24
"""Characters of JSON that are read at most: some hundred times what a net of a thousand layers has."""


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
        return json.dumps(asdict(self), sort_keys=True)

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
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
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
        ConfigError: A metric is no number, or a class name no string.
    """
    metrics, class_names, source = notes.get("metrics"), notes.get("class_names"), notes.get("source")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"metrics[{name!r}]={value!r}: numbers by name are needed, such as {{'accuracy': 0.91}}.")
    if any(not isinstance(name, str) for name in class_names or ()):
        raise ConfigError("class_names: strings are needed.")
    given: dict[str, Any] = {
        "inputs": inputs,
        "cpu": cpu_features(),
        "versions": {"qlightning": __version__, "torch": str(torch.__version__)},
        "metrics": {name: float(value) for name, value in (metrics or {}).items()},
        "class_names": tuple(class_names or ()),
        "source_sha256": "" if source is None else sha256(source),
    }
    found = report(int8)
    stored = int8.__dict__.get("metadata")
    if isinstance(stored, Metadata):  # of a model that was loaded from a file
        return replace(stored, backend=found.backend, **{name: value for name, value in given.items() if value})
    preparation = int8.__dict__["_preparation"]
    configs = list(preparation.qconfig.all())
    return Metadata(
        backend=found.backend,
        activation=found.activation,
        layers=tuple(LayerSpec(r.name, r.kind, r.int8, r.scheme if r.int8 else "", r.reason) for r in found.layers),
        exclude=tuple(str(pattern) for pattern in preparation.qconfig.exclude),
        mode=preparation.mode,
        full_range=any(a.activation.bits == 8 and w.weight.bits == 8 for a in configs for w in configs),
        **given,
    )


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
    strings: dict[str, Any] = {name: found[name] for name in _STRINGS if name in found}
    lists: dict[str, Any] = {name: tuple(found[name]) for name in ("exclude", "class_names") if name in found}
    tables: dict[str, Any] = {name: dict(found[name]) for name in ("versions", "metrics") if name in found}
    texts = [
        *strings.values(),
        *(item for items in lists.values() for item in items),
        *tables.get("versions", {}).values(),
    ]
    if any(not isinstance(text, str) for text in texts):
        raise TypeError("a text is none")
    metrics = {name: float(value) for name, value in tables.get("metrics", {}).items()}
    inputs = tuple(
        InputSpec(str(i["name"]), tuple(map(int, i["shape"])), str(i["dtype"]), tuple(map(int, i["example"])))
        for i in found["inputs"]
    )
    for spec in inputs:
        dtype_of(spec.dtype)
        if not spec.name.isidentifier() or len(spec.shape) != len(spec.example):
            raise ValueError(f"the input {spec.name!r} is none")
    layers = tuple(
        LayerSpec(str(r["name"]), str(r["kind"]), bool(r["int8"]), str(r["scheme"]), str(r["reason"]))
        for r in found["layers"]
    )
    if not isinstance(found.get("full_range", False), bool):
        raise TypeError("full_range is no flag")
    return {**found, **strings, **lists, **tables, "metrics": metrics, "inputs": inputs, "layers": layers}
