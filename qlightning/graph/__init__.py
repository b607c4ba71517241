"""From a float module to a prepared one to an int8 one."""

from qlightning.graph.bind import PLACE, delegate, replace_forward, restore_forward
from qlightning.graph.convert import convert, convert_standalone
from qlightning.graph.preparation import captured_roots, compile_graphs, is_prepared, uncompile_graphs
from qlightning.graph.prepare import prepare, unprepare

__all__ = [
    "PLACE",
    "captured_roots",
    "compile_graphs",
    "convert",
    "convert_standalone",
    "delegate",
    "is_prepared",
    "prepare",
    "replace_forward",
    "restore_forward",
    "uncompile_graphs",
    "unprepare",
]
