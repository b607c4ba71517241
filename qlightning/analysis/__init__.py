"""Looking inside: what quantization does to tensors."""

from qlightning.analysis.describe import Description, describe

__all__ = ["Description", "describe"]
