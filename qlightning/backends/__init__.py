"""Kernel families that int8 models run on."""

from qlightning.backends.base import Backend
from qlightning.backends.registry import available, backends, resolve_backend

__all__ = ["Backend", "available", "backends", "resolve_backend"]
