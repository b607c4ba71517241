"""Which backend runs the model of a file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace

from qlightning.backends import Backend, backends, resolve_backend
from qlightning.errors import BackendError
from qlightning.export.metadata import Metadata
from qlightning.qscheme import QScheme


def backend_for(
    wanted: str | Backend, facts: Metadata, activations: Iterable[QScheme], weights: Iterable[QScheme]
) -> Backend:
    """The backend that was asked for, or with "auto" the fastest here that can run the schemes.

    A warning says where it is another than the file was made for.

    Raises:
        BackendError: It cannot run here, or not these schemes.
    """
    chosen = resolve_backend(wanted)
    problem = _problem(chosen, activations, list(weights))
    if problem and wanted != "auto":
        raise BackendError(f"Backend {chosen.name!r} cannot run this file: {problem} Load it with backend='reference'.")
    if problem:
        warnings.warn(f"The file runs on 'reference', at float speed: {problem}", stacklevel=4)
        return replace(backends()["reference"], chosen=f"{chosen.name} does not take this file: {problem}")
    if chosen.name != facts.backend:
        warnings.warn(
            f"The file was made for backend {facts.backend!r} (CPU: {facts.cpu}) and runs on {chosen.name!r}: results "
            "may differ by the rounding of sums.",
            stacklevel=4,
        )
    return chosen


def _problem(backend: Backend, activations: Iterable[QScheme], weights: list[QScheme]) -> str:
    """Why a backend does not take the schemes; empty where it does."""
    for activation in activations:
        for weight in weights:
            if problem := backend.accepts(activation, weight):
                return problem
            if backend.saturates(activation, weight):
                return f"It has full 8-bit activations and weights, on which {backend.name} here would saturate."
    return ""
