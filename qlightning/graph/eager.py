"""Models written for PyTorch's eager-mode quantization (torch.ao): what of it is understood, and what is refused.

torch.ao is on its way out of torch, so its classes are known here by their qualified names.
"""

from __future__ import annotations

from torch import nn

from qlightning.errors import ConfigError
from qlightning.nn.float_functional import FloatFunctional
from qlightning.nn.qat import has_forward_hooks

_FUNCTIONALS = (
    "torch.ao.nn.quantized.modules.functional_modules.FloatFunctional",
    "torch.ao.nn.quantized.modules.functional_modules.FXFloatFunctional",
)
_FAKE = ("torch.ao.nn.qat.", "torch.ao.nn.intrinsic.qat.")
_QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
_OBSERVERS = ("torch.ao.quantization.fake_quantize.", "torch.ao.quantization.observer.")


def is_eager(module: nn.Module) -> bool:
    """Whether a module is one of torch.ao's, with a forward that is looked into as the user's own."""
    return type(module).__module__.startswith("torch.ao.")


def is_float_functional(module: nn.Module) -> bool:
    """Whether a module is torch.ao's FloatFunctional, which computes what the FloatFunctional here computes."""
    return _name(type(module)) in _FUNCTIONALS


def functionals_as_own(root: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Gives torch.ao's FloatFunctionals the class of the one here, for a trace; returns them and their own classes.

    One with hooks keeps its class: torch.ao's are never called themselves, so no hook of theirs runs either.
    """
    plain = (module for module in root.modules() if not has_forward_hooks(module))
    found = [(module, type(module)) for module in plain if is_float_functional(module)]
    for module, _ in found:
        module.__class__ = FloatFunctional
    return found


def check_not_quantized(name: str, module: nn.Module) -> None:
    """Refuses a module that torch.ao has prepared or quantized, as a float one can be had.

    Args:
        name: Of the module, below the model.
        module: The module.

    Raises:
        ConfigError: It, or what hangs on it, is torch.ao's fake quantization, an observer, or quantized.
    """
    where, found = name or "the model", _first(module, _FAKE)
    if found is not None:
        raise ConfigError(
            f"{where} is a {found}, which rounds its weight itself: prepare the model as it was before torch.ao's "
            f"prepare_qat{_or_exclude(name)}."
        )
    found = _first(module, _QUANTIZED)
    if found is not None and not any(_name(cls) in _FUNCTIONALS for cls in type(module).__mro__):
        raise ConfigError(
            f"{where} is a {found}, which is quantized already: prepare the float model that it was made from (of "
            f"torchvision's quantizable nets, the one with quantize=False){_or_exclude(name)}."
        )
    for child in module.children():
        if (found := _first(child, _OBSERVERS)) is not None:
            raise ConfigError(
                f"{where} ({type(module).__name__}) is observed by a {found}: prepare the model as it was before "
                f"torch.ao's prepare or prepare_qat{_or_exclude(name)}."
            )


def _or_exclude(name: str) -> str:
    return f", or keep it as it is with exclude=({name!r},)" if name else ""


def _first(module: nn.Module, origins: tuple[str, ...]) -> str | None:
    """The qualified name of the first of a module's classes that is from one of some modules of torch.ao."""
    return next((name for cls in type(module).__mro__ if (name := _name(cls)).startswith(origins)), None)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
