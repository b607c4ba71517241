"""FloatFunctional: arithmetic between tensors as a module, so that it has a name by which it can be set apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``torch.matmul``, by whom it is called on purpose: in a graph, the call of a product that is to be quantized."""
    if has_torch_function((x, y)):  # a symbol of a trace records this function, not the one that it calls
        result: Tensor = handle_torch_function(matmul, (x, y), x, y)
        return result
    return torch.matmul(x, y)


def _add_relu(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(torch.add(x, y))


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "add_relu": _add_relu,
    "add_scalar": torch.add,
    "cat": torch.cat,
    "matmul": matmul,
    "mul": torch.mul,
    "mul_scalar": torch.mul,
}


class FloatFunctional(nn.Module):
    """Sums, products and concatenations as methods of a module, as ``torch.ao.nn.quantized.FloatFunctional`` has them.

    It computes what torch's functions of these names compute, on any device and dtype, and holds nothing. After
    ``prepare``, every call of it that int8 calls read has a fake-quantizer of its own, however often a forward uses
    the module, and after ``convert`` it runs on int8. That is what plain ``+``, ``*`` and ``torch.cat`` get as well;
    this module adds a name, for ``exclude`` and ``overrides``, and ``matmul``: a plain product of two activations stays
    float, one that is asked for here is quantized.

    Forward hooks on it see the name of the operation and its operands; a module with hooks is called in one piece, in
    float.

    Examples:
        >>> f = FloatFunctional()
        >>> f.add_relu(torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0]))
        tensor([3., 0.])
        >>> f.mul_scalar(f.cat([torch.ones(1), torch.zeros(1)]), 0.5)
        tensor([0.5000, 0.0000])
    """

    def forward(self, operation: str, *operands: Any, **options: Any) -> Tensor:
        """Computes one operation; the methods call it by their own names."""
        return _OPERATIONS[operation](*operands, **options)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of two tensors."""
        return self._call("add", x, y)

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """The ReLU of the sum of two tensors, rounded once."""
        return self._call("add_relu", x, y)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """The sum of a tensor and a number."""
        return self._call("add_scalar", x, y)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of two tensors, element by element."""
        return self._call("mul", x, y)

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """The product of a tensor and a number."""
        return self._call("mul_scalar", x, y)

    def cat(self, x: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Tensors side by side along a dimension."""
        return self._call("cat", x, dim=dim)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The matrix product of two activations, as of ``torch.matmul``.

        Prepared, both operands lie on grids, and the result where int8 calls read it. Converted, the product is summed
        up in float32 between dequantize and quantize: on plain integer tensors torch has no batched kernel, and on one
        core its ``_int_mm`` in a loop took 20 to 30 times the CPU time of the float32 product (measured on torch
        2.14.1, 16 x 64 x 64 x 64 and 96 x 197 x 64 x 197), its classic ``quantized.matmul`` 1.1 times.
        """
        return self._call("matmul", x, y)

    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self(*args, **kwargs)
        return result
