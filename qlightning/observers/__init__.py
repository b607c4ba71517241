"""Observers: the statistics that find the range to quantize to."""

from qlightning.observers.base import Observer, Reduction
from qlightning.observers.histogram import HistogramObserver
from qlightning.observers.minmax import MinMaxObserver
from qlightning.observers.moving_average import MovingAverageObserver

__all__ = ["HistogramObserver", "MinMaxObserver", "MovingAverageObserver", "Observer", "Reduction"]
