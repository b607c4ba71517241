"""Observers: the statistics that find the range to quantize to."""

from qlightning.observers.base import Observer, Reduction
from qlightning.observers.counting import CountingObserver
from qlightning.observers.entropy import EntropyObserver
from qlightning.observers.fixed import FixedRangeObserver
from qlightning.observers.histogram import HistogramObserver
from qlightning.observers.minmax import MinMaxObserver
from qlightning.observers.moving_average import MovingAverageObserver
from qlightning.observers.mse import MSEObserver
from qlightning.observers.percentile import PercentileObserver

__all__ = [
    "CountingObserver",
    "EntropyObserver",
    "FixedRangeObserver",
    "HistogramObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "Observer",
    "PercentileObserver",
    "Reduction",
]
