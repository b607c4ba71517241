"""Validation on the int8 conversion of the current weights, in the middle of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qlightning.callbacks.targets import OWN_FORWARD
from qlightning.graph import captured_roots, convert, convert_standalone, replace_forward, restore_forward


class Int8Validation:
    """Lets prepared modules run their int8 conversions for a while.

    The prepared modules stay in their places with their parameters and buffers, so that checkpoints, optimizers and
    averages of weights see what they always see; their forwards alone are those of int8 modules.
    """

    def __init__(self) -> None:
        self._replaced: list[nn.Module] = []

    @property
    def is_on(self) -> bool:
        """Whether int8 forwards are in place."""
        return bool(self._replaced)

    def start(self, prepared: Mapping[str, nn.Module], backend: Any) -> None:
        """Converts the modules, by target name, and puts the int8 forwards in place."""
        for name, module in prepared.items():
            if name == OWN_FORWARD:
                self._replace(module, convert_standalone(module, backend))
                continue
            int8 = convert(module, backend=backend)
            for path, root in captured_roots(module):
                self._replace(root, int8.get_submodule(path))

    def stop(self) -> None:
        """Puts the forwards of the prepared modules back; does nothing where they are in place."""
        for module in self._replaced:
            restore_forward(module)
        self._replaced = []

    def _replace(self, module: nn.Module, int8: nn.Module) -> None:
        replace_forward(module, int8)
        self._replaced.append(module)
