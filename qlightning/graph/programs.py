"""The graphs of a module: one for every way of calling it and every state that it was in."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from qlightning.backends import kernels
from qlightning.errors import CaptureError, InputError, QuantizationError
from qlightning.graph.failure import TraceError
from qlightning.graph.joined import with_joined_activations
from qlightning.graph.reads import Read, matcher
from qlightning.graph.signature import LEAF, CallSpec, describe_call, signature_of

_MAX_VARIANTS = 64
_MAX_STATES = 8
_numbers = count()


Example = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Program:
    """A graph and the function it compiles to, which takes the module and the leaves of a call.

    Args:
        graph: The graph.
        reads: The plain values of the module on which it may depend.
        qdq: Of an int8 graph the QDQ form that it was made from.

    Attributes:
        example: Shape and dtype of each leaf of the first real call; None before, or where a leaf was no tensor.
    """

    def __init__(self, graph: fx.Graph, reads: tuple[Read, ...] = (), qdq: fx.Graph | None = None) -> None:
        self.graph = graph
        self.reads = reads
        self.qdq = qdq
        self.example: Example | None = None
        self.fits = matcher(reads)
        graph = with_joined_activations(graph)
        code = graph.python_code("self")
        source = _with_short_paths(code.src, graph)
        namespace = dict(code.globals)
        # torch.compile keeps what it has compiled, and which sizes vary, by code object and by name and place of code.
        exec(compile(source, f"<qlightning graph {next(_numbers)}>", "exec"), namespace)
        self.run: Callable[..., Any] = namespace["forward"]

    def note(self, leaves: tuple[Any, ...] | list[Any]) -> None:
        """Remembers what the first call looked like."""
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            self.example = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self  # never changed after it is built, but for the example


def _with_short_paths(source: str, graph: fx.Graph) -> str:
    """The code of a graph with quick ways to the kernels that layers are bound to.

    Every submodule that is asked for as an attribute costs a microsecond: ``nn.Module`` finds it when all else has
    failed.
    """
    for node in graph.nodes:
        if node.op == "get_attr" and all(user.target is kernels.call for user in node.users):
            *path, name = str(node.target).split(".")
            quick = "self" + "".join(f"._modules[{part!r}]" for part in path) + f".{name}"
            line = re.compile(rf"^(\s+{node.name} = )[^;\n]*", flags=re.MULTILINE)
            source = line.sub(rf"\g<1>{quick}", source)
    return source


class Captured:
    """The graphs of one module: one for every way of calling it, in training and in eval mode.

    Args:
        original: The class of the module, whose forward was traced.
        trace: Builds the program for a way of calling, as the module is now; None: only those added are there.

    Attributes:
        programs: From the way of calling and the mode to the programs, one for every state that the module was in.
    """

    def __init__(self, original: type[nn.Module], trace: Callable[[nn.Module, CallSpec], Program] | None) -> None:
        self.original = original
        self.signature = signature_of(original)
        self.programs: dict[tuple[CallSpec, bool], list[Program]] = {}
        self._trace = trace
        self._plain: dict[tuple[int, bool], list[Program]] = {}
        self._numeric: set[CallSpec] = set()
        self._changes = False
        self._compiled: dict[Program, Callable[..., Any]] | None = None

    @property
    def preparer(self) -> Any:
        """What traces the module, where that is a method: of a prepared module its GraphPreparer."""
        return getattr(self._trace, "__self__", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}  # copies are not compiled

    def compile(self) -> None:
        """Runs the graphs by torch.compile from now on, each compiled when it is next called."""
        self._compiled = {}

    def uncompile(self) -> None:
        """Runs the graphs as they are again."""
        self._compiled = None

    def follow(self, other: Captured) -> None:
        """Tells calls apart as the graphs of another module do."""
        self.signature, self._numeric = other.signature, set(other._numeric)

    def add(self, spec: CallSpec, training: bool, program: Program) -> None:
        """Keeps the program for a way of calling."""
        self.programs.setdefault((spec, training), []).append(program)
        positional, keywords = spec.key
        if not keywords and all(value == LEAF for value in positional):
            self._plain[len(positional), training] = self.programs[spec, training]

    def expect(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frozen: bool) -> None:
        """Traces the module for a call like this one, in its mode.

        Args:
            module: The module.
            args: Arguments that stand for those of a call.
            kwargs: Likewise.
            frozen: Whether numbers among them are part of the graph.

        Raises:
            TraceError: The forward cannot be traced for it.
        """
        if frozen:
            self._numeric.add(describe_call(self.signature, args, kwargs)[0])
        self.program(module, describe_call(self.signature, args, kwargs, freeze_numbers=frozen)[0])

    def remember(self, names: list[str], example: Example) -> None:
        """Takes a call with leaves of these names for one that was seen."""
        for (spec, _), programs in self.programs.items():
            for program in programs:
                if spec.leaf_names == names and program.example is None:
                    program.example = example

    def rewrite(self, change: Callable[[Program], Program]) -> None:
        """Puts another program in the place of each."""
        entries = [(key, program) for key, programs in self.programs.items() for program in programs]
        changed = {program: change(program) for _, program in entries}
        self.programs, self._plain = {}, {}
        for (spec, training), program in entries:
            self.add(spec, training, changed[program])

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph for these arguments, and traces it first where there is none.

        Raises:
            CaptureError: The forward cannot be traced for them.
        """
        training = module.training
        plain = not kwargs and all(isinstance(value, Tensor) for value in args)
        if plain and (known := self._plain.get((len(args), training))) is not None:
            for program in known:
                if program.fits(module):
                    return self._function(program, args)(module, *args)
        spec, program, leaves = self.find(module, args, kwargs)
        if plain:
            self._plain[len(args), training] = self.programs[spec, training]
        return self._function(program, leaves)(module, *leaves)

    def find(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallSpec, Program, list[Any]]:
        """How a call is made, the program for it, traced first where there is none, and the leaves that this takes.

        Raises:
            CaptureError: The forward cannot be traced for it.
        """
        spec, leaves = describe_call(self.signature, args, kwargs)
        if spec in self._numeric:
            spec, leaves = describe_call(self.signature, args, kwargs, freeze_numbers=True)
        try:
            return spec, self.program(module, spec), leaves
        except TraceError as error:
            frozen, leaves = describe_call(self.signature, args, kwargs, freeze_numbers=True)
            if frozen == spec:
                raise _untraceable(self.original, error) from error
            self._numeric.add(spec)
            try:
                return frozen, self.program(module, frozen), leaves
            except TraceError as again:
                raise _untraceable(self.original, again) from again

    def _function(self, program: Program, leaves: tuple[Any, ...] | list[Any]) -> Callable[..., Any]:
        if torch.compiler.is_compiling():
            return program.run
        if program.example is None:
            program.note(leaves)
        if self._compiled is None:
            return program.run
        if program not in self._compiled:
            self._compiled[program] = torch.compile(program.run)
        return self._compiled[program]

    def program(self, module: nn.Module, spec: CallSpec) -> Program:
        """The program for a way of calling, in the mode and state that the module is in; traced where there is none.

        Raises:
            TraceError: The forward cannot be traced for it.
            CaptureError: There is none, and no more can be traced.
        """
        known = self.programs.get((spec, module.training), [])
        for program in known:
            if program.fits(module):
                return program
        if self._trace is None:
            raise CaptureError(
                f"{self.original.__name__}: this int8 model was never called this way before it was converted: "
                f"{spec.describe()}{_states(known, module)}. Call the prepared model so once (flags and None count), "
                f"then convert."
            )
        if len(self.programs) >= _MAX_VARIANTS and not known:
            raise CaptureError(
                f"{self.original.__name__}: called in more than {_MAX_VARIANTS} different ways; numbers or strings "
                f"that change with every call cannot be part of a graph. Pass them as tensors, or exclude the module."
            )
        program = self._trace(module, spec)
        self.add(spec, module.training, program)
        known = self.programs[spec, module.training]
        if len(known) > _MAX_STATES:
            if not self._changes:
                self._changes = True
                warnings.warn(
                    f"{self.original.__name__} is traced anew for every value of what its forward reads: "
                    f"{', '.join(_differing(known))}. What changes often is faster as an argument or as a buffer.",
                    stacklevel=4,
                )
            del known[0]
        return program


class Int8Captured(Captured):
    """The graphs of a module in int8, which are not traced any more.

    Args:
        original: The class of the module, whose forward was traced.
    """

    def __init__(self, original: type[nn.Module]) -> None:
        super().__init__(original, None)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph for these arguments.

        Raises:
            CaptureError: There is none.
            InputError: It cannot compute them, and one of them differs from what it was made with.
        """
        if torch.compiler.is_compiling():
            return super().run(module, args, kwargs)
        try:
            return super().run(module, args, kwargs)
        except (RuntimeError, AssertionError) as error:
            if type(error) in (RuntimeError, AssertionError) and (differing := self._unlike(module, args, kwargs)):
                raise InputError(f"{self.original.__name__}, in int8: {differing} {str(error).strip()}") from error
            raise

    def _unlike(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The arguments whose shapes, batches apart, or dtypes differ from the first ones; empty where none does."""
        spec, leaves = describe_call(self.signature, args, kwargs)
        example = next((p.example for p in self.programs.get((spec, module.training), []) if p.example), ())
        found = [
            f"its input {name!r} is {_looks(leaf.shape, leaf.dtype)}; it was made with {_looks(shape, dtype)}."
            for name, leaf, (shape, dtype) in zip(spec.leaf_names, leaves, example, strict=False)
            if leaf.dtype != dtype or (leaf.dim(), leaf.shape[1:]) != (len(shape), shape[1:])
        ]
        return " ".join(found)


def _looks(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _differing(programs: list[Program]) -> list[str]:
    """The attributes whose values tell programs apart."""
    values: dict[str, set[Any]] = {}
    for program in programs:
        for path, name, value in program.reads:
            values.setdefault(f"{path}.{name}".lstrip("."), set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


def _states(programs: list[Program], module: nn.Module) -> str:
    """For a message: what differs from the states that there are programs for."""
    reads = programs[-1].reads if programs else ()
    changed = [f"{read[0]}.{read[1]}".lstrip(".") for read in reads if not matcher((read,))(module)]
    return f", with other values of {', '.join(changed)}" if changed else ""


def _untraceable(original: type[nn.Module], error: TraceError) -> QuantizationError:
    return CaptureError(f"{original.__name__}, called with these arguments: {error}")
