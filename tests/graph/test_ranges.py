"""ranges: what grids cover, before convert."""

import copy
import math

import pytest
import torch
from torch import nn

from qlightning import QConfig, calibrate, convert, prepare, ranges
from qlightning.errors import ConfigError
from qlightning.graph.ranges import WIDE
from qlightning.observers import HistogramObserver, MinMaxObserver


class Branches(nn.Module):
    """A branch that runs away and one that is rarely taken."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, other: bool = False):
        x = self.first(x)
        return self.other(x) if other else self.second(torch.relu(x))


def test_every_grid_is_listed_with_its_ends():
    net = prepare(Branches(), QConfig(activation_observer=MinMaxObserver), mode="ptq")
    assert {row.remark for row in ranges(net).rows} == {"never observed"}
    assert all(math.isnan(row.low) for row in ranges(net).rows)
    x = torch.linspace(-2, 3, 40).view(10, 4)
    calibrate(net, [x])
    found = {row.name: row for row in ranges(net).rows if row.what == "activation" and not row.remark}
    first = next(iter(found.values()))
    assert first.low == pytest.approx(-2, abs=first.step)
    assert first.high == pytest.approx(3, abs=first.step)
    assert first.step == pytest.approx(5 / 255)
    text = str(ranges(net))
    assert text.splitlines()[0].split() == ["place", "of", "lowest", "highest", "step", "scheme", "remark"]
    assert len(text.splitlines()) == 2 + len(ranges(net).rows)


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
def test_a_runaway_range_is_reported_before_convert_and_by_it(observer):  # C80
    net = Branches().eval()
    with torch.no_grad():
        net.first.weight[0] *= 1e26
    prepared = prepare(copy.deepcopy(net), QConfig(activation_observer=observer), mode="ptq")
    calibrate(prepared, [torch.randn(10, 4)])
    unusual = [row for row in ranges(prepared).unusual if row.what == "activation" and row.remark != "never observed"]
    assert unusual
    assert all(row.high > WIDE for row in unusual)
    with pytest.warns(UserWarning, match="Ranges far beyond 1e"):
        int8 = convert(prepared)
    assert int8(torch.randn(3, 4)).isfinite().all()


def test_zeros_are_said_to_be_zeros():
    prepared = prepare(Branches(), mode="ptq")
    calibrate(prepared, [torch.zeros(3, 4)])
    assert "nothing but zeros was seen" in {row.remark for row in ranges(prepared).rows}


def test_models_without_grids_are_errors():
    prepared = prepare(Branches(), mode="ptq")
    calibrate(prepared, [torch.randn(3, 4)])
    int8 = convert(prepared)
    for model in (Branches(), int8):
        with pytest.raises(ConfigError, match="not prepared"):
            ranges(model)
    with pytest.raises(ConfigError, match="in int8 already"):
        convert(int8)
