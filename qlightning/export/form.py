"""The QDQ form that exporters of others take, and what they say when they cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qlightning.errors import ConfigError
from qlightning.graph.qdq_module import QDQModule, qdq_module


def tried_form(int8: nn.Module, example_inputs: Any) -> QDQModule:
    """The QDQ form of a model, once its example has gone through it.

    Exporters would say of an example of wrong sizes that the model is at fault.

    Raises:
        ConfigError: The model is not in int8 as a whole, or does not take the example.
        ArtifactError: No call is known, or none like the example.
    """
    qdq = qdq_module(int8, example_inputs)
    try:
        with torch.no_grad():
            qdq.module(*qdq.example)
    except Exception as error:  # each operator has its own
        sizes = ", ".join(f"{name} of {tuple(x.shape)}" for name, x in zip(qdq.names, qdq.example, strict=True))
        raise ConfigError(
            f"{type(int8).__name__} does not take an example like {sizes}: {first_paragraph(error)}. Give "
            "example_inputs like those of a call (--input on the command line)."
        ) from error
    return qdq


def first_paragraph(error: BaseException) -> str:
    """What an error says, without the traces and hints that exporters add behind a blank line."""
    return str(error).strip().split("\n\n")[0].rstrip(".")
