"""Layers of prepared and of converted models, and modules that models are written with."""

from qlightning.nn.float_functional import FloatFunctional

__all__ = ["FloatFunctional"]
