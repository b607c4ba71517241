"""The backends by name, and which of them this machine gets."""

from __future__ import annotations

import platform
import warnings
from dataclasses import replace
from functools import lru_cache

from qlightning.backends import engines, onednn, onnxruntime, openvino, reference
from qlightning.backends.base import Backend, cpu_features
from qlightning.errors import BackendError, ConfigError, closest


@lru_cache
def backends() -> dict[str, Backend]:
    """All backends by name, those that this machine lacks included."""
    built = (onednn.build(), openvino.build(), onnxruntime.build(), *engines.build(), reference.build())
    return {backend.name: backend for backend in built}


def available() -> list[str]:
    """Names of the backends that this machine can run."""
    return [name for name, backend in backends().items() if not backend.unavailable]


def resolve_backend(backend: str | Backend) -> Backend:
    """Returns the backend of a name; ``"auto"`` picks by the CPU.

    Raises:
        ConfigError: No backend has this name.
        BackendError: This machine cannot run it.

    Examples:
        >>> resolve_backend("reference").name
        'reference'
    """
    if isinstance(backend, Backend):
        return _usable(backend)
    if not isinstance(backend, str):
        raise ConfigError(f"backend={backend!r}: a name or a Backend is needed; here: {', '.join(available())}.")
    if backend == "auto":
        return _auto()
    if backend not in backends():
        raise ConfigError(
            f"Unknown backend {backend!r}.{closest(backend, backends())} Available on this machine: "
            f"auto, {', '.join(available())}."
        )
    return _usable(backends()[backend])


def _usable(found: Backend) -> Backend:
    if found.unavailable:
        raise BackendError(
            f"Backend {found.name!r} cannot run here: {found.unavailable} Available: {', '.join(available())}."
        )
    return found


def _auto() -> Backend:
    found = backends()
    onednn, reference = found["onednn"], found["reference"]
    if not onednn.unavailable:
        return _explained(onednn, found["openvino"].unavailable)
    classic = [name for name in available() if name != "reference"]
    warnings.warn(
        f"'auto' finds no int8 kernels on this machine ({platform.machine()}: {onednn.unavailable}) The backend is "
        f"'reference', which gives the int8 results at float speed."
        + (f" torch's classic engines here: {', '.join(classic)}." if classic else ""),
        stacklevel=3,
    )
    return replace(reference, chosen=f"onednn cannot run here ({platform.machine()}): {onednn.unavailable}")


@lru_cache
def _explained(onednn: Backend, openvino_lacks: str) -> Backend:
    """The backend with the reason for it: built once, as functions on tensors ask for it in every call."""
    faster = f"is not installed here: {openvino_lacks}" if openvino_lacks else "is installed here."
    return replace(
        onednn,
        chosen=f"this CPU ({cpu_features()}) runs its int8 kernels, which come with torch and compile nothing. auto "
        f"takes no runtime, as these compile for every new shape; openvino, faster on most nets, {faster}",
    )
