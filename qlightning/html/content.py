"""What a page shows, as plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Code:
    """How often the codes of a grid occur, and what lies beyond them.

    Attributes:
        counts: Elements in each bin of ``width`` codes; the first bin begins half a code below ``first``.
        first: The lowest code of the first bin.
        width: Codes a bin.
        quant_min: The lowest code of the grid.
        quant_max: The highest.
        used: How many different codes occur.
        below: The share of elements that lay below the grid and were clipped; 0 to 1.
        above: The share that lay above it.
        lowest: The share of elements on the lowest code, clipped ones included.
        highest: The share on the highest code.
    """

    counts: tuple[int, ...]
    first: int
    width: int
    quant_min: int
    quant_max: int
    used: int
    below: float = 0.0
    above: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def levels(self) -> int:
        """The number of codes that the grid has."""
        return self.quant_max - self.quant_min + 1

    @property
    def unused(self) -> int:
        """The number of codes that never occur."""
        return self.levels - self.used

    @property
    def clipped(self) -> float:
        """The share of elements beyond the grid."""
        return self.below + self.above


@dataclass(frozen=True)
class Grid:
    """The grid of an activation.

    Attributes:
        name: Its place in the model.
        scheme: In words.
        low: The lowest value that it represents; of all channels, where each has its own.
        high: The highest.
        step: The distance of its codes, the largest of all channels.
        zero_point: The code of zero; None where channels have their own.
        sqnr: The signal-to-quantization-noise ratio of rounding to it, in dB; None: not measured.
        codes: What was seen on it; None: nothing was.
    """

    name: str
    scheme: str
    low: float
    high: float
    step: float
    zero_point: int | None = None
    sqnr: float | None = None
    codes: Code | None = None


@dataclass(frozen=True)
class Layer:
    """A layer of the model.

    Attributes:
        name: Its name.
        kind: Its type.
        int8: Whether it computes on int8.
        reason: Why it stays float.
        scheme: The grid of its weight, in words.
        kernel: What computes it.
        weight_sqnr: Of its weight, BatchNorm folded in, in dB; None: not measured.
        worst_channel: The channel of the weight with the least ratio, and that.
        output_sqnr: Of its result in the int8 model against the float model, all layers before it included.
        weight: How the codes of its weight are used.
        grid: The name of the grid of its input.
    """

    name: str
    kind: str
    int8: bool
    reason: str = ""
    scheme: str = ""
    kernel: str = ""
    weight_sqnr: float | None = None
    worst_channel: tuple[int, float] | None = None
    output_sqnr: float | None = None
    weight: Code | None = None
    grid: str = ""


@dataclass(frozen=True)
class History:
    """What was sampled during a training: a value for each of ``steps``, None where there was none yet.

    Attributes:
        steps: Optimizer steps.
        low: By grid: the lowest value that it represents.
        high: The highest.
        clip: By grid: the share of elements beyond it.
        sqnr: By layer: of the weight, in dB.
    """

    steps: tuple[int, ...] = ()
    low: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    high: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    clip: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    sqnr: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """What held from a step of the training on.

    Attributes:
        step: The optimizer step.
        epoch: The epoch.
        number: How many of fake quantization, frozen ranges and frozen BatchNorm hold: 0 to 3.
        what: In words.
    """

    step: int
    epoch: int
    number: int
    what: str


@dataclass(frozen=True)
class Measured:
    """The figures of one form of the model.

    Attributes:
        name: "float", "fake-quantized" or "int8".
        metrics: By name.
        size: Bytes of its parameters and buffers; None: not known.
        latency: Milliseconds of a call; None: not measured.
    """

    name: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    size: int | None = None
    latency: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one layer costs.

    Attributes:
        layer: Its name.
        value: How much; larger is worse.
        shown: The same in words, with its unit.
        note: What was decided on it.
    """

    layer: str
    value: float
    shown: str
    note: str = ""


@dataclass(frozen=True)
class Step:
    """What a step of post-training quantization changed.

    Attributes:
        name: The step.
        measure: What ``before`` and ``after`` of the rows count.
        rows: Layer, whether it was changed, what was done, before, after.
    """

    name: str
    measure: str
    rows: tuple[tuple[str, bool, str, float | None, float | None], ...]


@dataclass(frozen=True)
class Page:
    """Everything that the report shows.

    Attributes:
        title: The model.
        made: When.
        facts: Short facts under the title: name and value.
        measured: The forms of the model.
        metrics: What was logged last, by name, where it is not known of which form.
        output_sqnr: Of what the model gives, int8 against float, in dB.
        same_answer: The share of samples for which both have the same largest output.
        samples: In how many samples activations were looked at.
        layers: In the order of the model.
        grids: Of the activations, likewise.
        history: Of a training.
        length: The last optimizer step of the training.
        stages: Of its schedule, as it happened.
        sensitivity: Worst first.
        sensitivity_unit: What its values count.
        steps: Of post-training quantization.
        settings: Name and value.
        versions: Name and value.
        notes: Sentences.
        missing: What the page lacks, and how to get it.
    """

    title: str
    made: str
    facts: tuple[tuple[str, str], ...] = ()
    measured: tuple[Measured, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    output_sqnr: float | None = None
    same_answer: float | None = None
    samples: int = 0
    layers: tuple[Layer, ...] = ()
    grids: tuple[Grid, ...] = ()
    history: History = field(default_factory=History)
    length: int = 0
    stages: tuple[Stage, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    sensitivity_unit: str = ""
    steps: tuple[Step, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
