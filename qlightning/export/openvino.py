"""OpenVINO IR: the ONNX form as ``.xml`` (the graph and our facts) and ``.bin`` (the integers)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import Unpack

from qlightning.errors import ArtifactError
from qlightning.export.metadata import KEY, MAX_LENGTH, Metadata, Notes, sha256
from qlightning.export.onnx import onnx_model
from qlightning.files import written_whole

_DIGEST = f"{KEY}_bin_sha256"
MAX_GRAPH = 2**28
"""Bytes of XML that are read at most: a net of a thousand layers has some 2**22."""


def save_openvino(int8: nn.Module, path: str | Path, *, example_inputs: Any = None, **notes: Unpack[Notes]) -> Metadata:
    """Writes an int8 model as OpenVINO IR: ``net.xml``, and ``net.bin`` beside it, which belongs to it.

    Weights are int8 in the file, all else float32. Each file is complete or not there; of an interrupted call the old
    ``.xml`` may stay beside the new ``.bin``, which :func:`openvino_metadata` notices.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, ``.xml``.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        notes: What else the file is to say.

    Returns:
        The facts that the file carries, in its ``rt_info``.

    Raises:
        ConfigError: The model is no int8 graph as a whole; names the parts that are.
        ArtifactError: The shapes of its inputs are not known, or it has a part that ONNX or OpenVINO lacks.
        ImportError: openvino, onnx or onnxscript is not installed.
    """
    openvino = _openvino()
    proto, found = onnx_model(int8, example_inputs, **notes)
    try:
        model = openvino.Core().read_model(proto.SerializeToString())
    except RuntimeError as error:
        raise ArtifactError(f"{type(int8).__name__}: OpenVINO cannot take it: {error}. Save it as .pt2.") from error
    model.set_rt_info(found.to_json(), [KEY])
    target = Path(path)
    with written_whole(target) as graph, written_whole(weights_of(target)) as weights:
        temporary = Path(graph)
        try:
            # OpenVINO writes the weights beside the graph, under its name.
            openvino.save_model(model, temporary, compress_to_fp16=False)
            model.set_rt_info(sha256(weights_of(temporary)), [_DIGEST])
            openvino.save_model(model, temporary, compress_to_fp16=False)
            weights_of(temporary).replace(weights)
        finally:
            weights_of(temporary).unlink(missing_ok=True)
    return found


def openvino_metadata(path: str | Path) -> Metadata:
    """The facts that a file from :func:`save_openvino` carries; the ``.bin`` beside it has to be the one saved with it.

    Raises:
        ArtifactError: It is no such file, is damaged, or its ``.bin`` is another one.
        FileNotFoundError: One of the two files is not there.
    """
    path = Path(path)
    with open(path, "rb") as file:
        content = file.read(MAX_GRAPH + 1)
    if len(content) > MAX_GRAPH or b"<!" in content:  # entities could grow without end
        raise ArtifactError(f"{path} is no OpenVINO IR: it has declarations, or more than {MAX_GRAPH} bytes.")
    try:
        info = ElementTree.fromstring(content).find("rt_info")
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ArtifactError(f"{path} is no OpenVINO IR: {error}.") from error
    values = {entry.tag: entry.get("value", "") for entry in (info if info is not None else ())}
    text = values.get(KEY)
    if text is None or len(text) > MAX_LENGTH:
        raise ArtifactError(f"{path}: there is no metadata of qlightning in it.")
    found = Metadata.from_json(text, str(path))
    if sha256(weights_of(path)) != values.get(_DIGEST):
        raise ArtifactError(f"{weights_of(path)} is not the file that was saved with {path.name}, or is damaged.")
    return found


def weights_of(path: Path) -> Path:
    """The file with the integers of an ``.xml``."""
    return path.with_suffix(".bin")


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise ImportError(
            "OpenVINO IR needs openvino, onnx and onnxscript: pip install 'qlightning[openvino]'."
        ) from error
    return openvino
