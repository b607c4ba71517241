"""The report as one HTML file: what is on the page, and how it is drawn. It knows plain facts alone, no tensors."""

from qlightning.html.content import (
    Code,
    Grid,
    History,
    Layer,
    Measured,
    Page,
    Sensitivity,
    Stage,
    Step,
)
from qlightning.html.page import render

__all__ = ["Code", "Grid", "History", "Layer", "Measured", "Page", "Sensitivity", "Stage", "Step", "render"]
