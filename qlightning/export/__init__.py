"""Files that int8 models leave in."""

from qlightning.export.metadata import Metadata

__all__ = ["Metadata"]
