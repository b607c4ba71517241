"""The phase of the schedule put into effect on prepared modules, before every training batch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qlightning.callbacks.averaging import FrozenStatistics
from qlightning.callbacks.schedule import Phase
from qlightning.fake_quantize import FakeQuantize
from qlightning.graph import captured_roots
from qlightning.graph.bind import GRAPH_MODULES


class PhaseSwitch:
    """The fake-quantizers and BatchNorms of prepared modules, which follow the phases.

    Args:
        prepared: The prepared modules.

    Attributes:
        fake_quantizers: Those that are there, as of the last phase.
        statistics: Of the BatchNorms that are frozen.
    """

    def __init__(self, prepared: Iterable[nn.Module]) -> None:
        self.fake_quantizers: list[FakeQuantize] = []
        self.statistics = FrozenStatistics()
        self._prepared = list(prepared)
        self._bns: list[_BatchNorm] = []
        self._frozen: list[_BatchNorm] = []
        self._roots: list[nn.Module] = []
        self._sizes: list[int] = []

    def apply(self, phase: Phase, observes: bool) -> None:
        """Sets every switch to a phase; cheap where it is set already.

        Args:
            phase: The phase.
            observes: Whether observers follow the batches.
        """
        self._search()
        for fq in self.fake_quantizers:
            # Training mode of its own: a net that its user keeps in eval mode has ranges too.
            if not fq.training:
                fq.training = True
            if fq.observer_enabled is not observes:
                fq.observer_enabled = observes
            if fq.fake_quant_enabled is not phase.fake_quant:
                fq.fake_quant_enabled = phase.fake_quant
        if not phase.bn_frozen:
            self.thaw()
            return
        for bn in self._bns:
            if bn.training:
                bn.training = False
                self._frozen.append(bn)
                self.statistics.hold(bn)

    def thaw(self) -> None:
        """Gives the BatchNorms that were frozen here, and no others, their mode back."""
        for bn in self._frozen:
            bn.training = True
        self._frozen = []

    def _search(self) -> None:
        """Looks for what to switch, again only where a graph was added: this is for every batch."""
        if self._roots and self._sizes == [_grids(root) for root in self._roots]:
            return
        self._roots = [root for module in self._prepared for _, root in captured_roots(module)]
        self._sizes = [_grids(root) for root in self._roots]
        modules = [m for module in self._prepared for m in module.modules()]
        self.fake_quantizers = [m for m in modules if isinstance(m, FakeQuantize)]
        self._bns = [m for m in modules if isinstance(m, _BatchNorm)]


def _grids(root: nn.Module) -> int:
    modules = root._modules.get(GRAPH_MODULES)
    return len(modules._modules) if modules is not None else 0
