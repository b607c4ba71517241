import copy
import pickle
from typing import Any

import pytest
from torch import nn

from qlightning import QConfig, QScheme
from qlightning.errors import ConfigError
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver
from qlightning.qconfig import Resolver

FEW = QConfig(weight=QScheme(bits=4, symmetric=True))
FEWER = QConfig(weight=QScheme(bits=3, symmetric=True))


class Head(nn.Linear):
    """A layer of the user's own type."""


def net() -> nn.Sequential:
    stage = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 3, 1))
    model.add_module("stages", nn.ModuleList([stage, copy.deepcopy(stage)]))
    model.add_module("head", Head(3, 2))
    return model


def resolve(name: str, **settings: Any) -> tuple[QConfig | None, str]:
    return Resolver(net(), QConfig(**settings)).resolve(name)


class TestQConfig:
    def test_defaults(self) -> None:
        config = QConfig()
        assert config.activation == QScheme(bits=8, signed=False, symmetric=False, axis=None)
        assert config.weight == QScheme(bits=8, signed=True, symmetric=True, axis=0, narrow_range=True)
        assert type(config.build_activation_observer("qat")) is MovingAverageObserver
        assert type(config.build_activation_observer("ptq")) is HistogramObserver
        assert type(config.build_weight_observer()) is MinMaxObserver

    def test_observers_are_built_from_the_scheme(self) -> None:
        config = QConfig(activation_observer=MinMaxObserver, weight_observer=HistogramObserver, weight=QScheme())
        assert config.build_activation_observer("qat").scheme == config.activation
        assert config.build_weight_observer().scheme == config.weight
        assert config.build_activation_observer("qat") is not config.build_activation_observer("qat")

    @pytest.mark.parametrize(
        "settings, match",
        [
            ({"activation": 8}, "activation=8: a QScheme"),
            ({"weight": "int8"}, "weight='int8': a QScheme"),
            ({"activation_observer": "minmax"}, "activation_observer='minmax'"),
            ({"weight_observer": MinMaxObserver(QScheme())}, "builds an observer"),
            ({"exclude": (3,)}, "pattern 3"),
            ({"overrides": {3: None}}, "pattern 3"),
            ({"overrides": {"a": 8}}, r"overrides\['a'\]=8"),
        ],
    )
    def test_checks_itself(self, settings: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            QConfig(**settings)

    def test_is_a_value(self) -> None:
        assert QConfig(exclude=["a"], overrides={"b": None}) == QConfig(exclude=("a",), overrides={"b": None})
        assert QConfig(exclude="a").exclude == ("a",)
        assert QConfig(exclude=nn.Linear).exclude == (nn.Linear,)
        assert QConfig().excluding(("a",)).excluding("b").exclude == ("a", "b")
        assert copy.deepcopy(FEW) is FEW
        with pytest.raises(TypeError):
            FEW.overrides["a"] = None  # type: ignore[index]

    def test_pickles(self) -> None:
        config = QConfig(exclude=("a",), overrides={"b": FEW, nn.Linear: None})
        assert pickle.loads(pickle.dumps(config)) == config

    def test_all_of_its_overrides(self) -> None:
        config = QConfig(overrides={"a": FEW, "b": None, "c": QConfig(overrides={"d": FEWER})})
        assert [c.weight.bits for c in config.all()] == [8, 4, 8, 3]


class TestResolver:
    @pytest.mark.parametrize(
        "pattern, names",
        [
            ("stem", {"stem"}),
            ("stages", {"stages.0.0", "stages.1.0"}),
            ("stages.1", {"stages.1.0"}),
            ("stages.?.0", {"stages.0.0", "stages.1.0"}),
            ("st*", {"stem", "stages.0.0", "stages.1.0"}),
            (nn.Conv2d, {"stem", "stages.0.0", "stages.1.0"}),
            (nn.Linear, {"head"}),
            ("torch.nn.Linear", {"head"}),
            ("torch.nn.modules.linear.Linear", {"head"}),
            (nn.ModuleList, {"stages.0.0", "stages.1.0"}),
            ("*", {"stem", "stages.0.0", "stages.1.0", "head"}),
            ("", {"stem", "stages.0.0", "stages.1.0", "head"}),
        ],
    )
    def test_patterns(self, pattern: str | type[nn.Module], names: set[str]) -> None:
        layers = ["stem", "stages.0.0", "stages.1.0", "head"]
        for settings in ({"exclude": (pattern,)}, {"overrides": {pattern: None}}):
            found = {name for name in layers if resolve(name, **settings)[0] is None}
            assert found == names, settings
        assert {name for name in layers if resolve(name, overrides={pattern: FEW})[0] is FEW} == names

    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_name_beats_a_glob_beats_a_type(self, reverse: bool) -> None:
        overrides: dict[Any, QConfig | None] = {nn.Conv2d: FEW, "stages.*.0": FEWER, "stages.0.0": None}
        if reverse:
            overrides = dict(reversed(overrides.items()))
        resolver = Resolver(net(), QConfig(overrides=overrides))
        assert resolver.resolve("stem")[0] is FEW
        assert resolver.resolve("stages.1.0")[0] is FEWER
        assert resolver.resolve("stages.0.0") == (None, "kept float by override 'stages.0.0'")
        assert resolver.resolve("head")[0] is not None

    def test_exclude_beats_all(self) -> None:
        assert resolve("stages.0.0", exclude=(nn.ModuleList,), overrides={"stages.0.0": FEW}) == (
            None,
            "excluded by ModuleList",
        )

    @pytest.mark.parametrize(
        "pattern, match",
        [
            ("steem", "'steem' matches no module of Sequential.* Did you mean 'stem'"),
            ("stages.2", "Did you mean 'stages"),
            ("stages.7.*", "matches no module"),
            (nn.LSTM, "LSTM"),
            ("torch.nn.LSTM", "matches no module"),
        ],
    )
    @pytest.mark.parametrize("place", ["exclude", "overrides"])
    def test_what_matches_nothing_is_an_error(self, pattern: Any, match: str, place: str) -> None:
        settings: dict[str, Any] = {place: (pattern,) if place == "exclude" else {pattern: FEW}}
        with pytest.raises(ConfigError, match=match):
            resolve("stem", **settings)
