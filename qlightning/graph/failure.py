"""Why the forward of a module could not be traced: which module, which line, what was wrong."""

from __future__ import annotations

import dataclasses
import inspect
import traceback

from torch import nn


@dataclasses.dataclass(frozen=True)
class TraceFailure:
    """Why the forward of a module could not be traced.

    Attributes:
        path: Name of the module below the root whose own code it was; "" for the root.
        module_type: Its class.
        where: ``file:line`` of its code.
        message: What the tracer said.
    """

    path: str
    module_type: str
    where: str
    message: str

    def __str__(self) -> str:
        name = f"{self.path} ({self.module_type})" if self.path else self.module_type
        return f"{name} cannot be traced at {self.where}: {self.message}"


class TraceError(Exception):
    """Carries a TraceFailure out of the tracer."""

    def __init__(self, failure: TraceFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def failure_of(path: str, module: nn.Module, error: Exception, cls: type | None = None) -> TraceFailure:
    """What an error in the trace of a module says, with the line of the user's code that it came from."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/qlightning/graph/" not in frame.filename and frame.filename[0] != "<"
    ]
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        if frames[-1].line:
            message = f"`{frames[-1].line}`: {message}"
    else:
        where = source_of(cls or type(module))
    return TraceFailure(path, (cls or type(module)).__name__, where, message)


def source_of(cls: type) -> str:
    """``file:line`` of the forward of a class."""
    try:
        return f"{inspect.getsourcefile(cls.forward)}:{inspect.getsourcelines(cls.forward)[1]}"  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return "unknown source"
