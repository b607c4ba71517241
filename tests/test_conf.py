"""Every config composes and instantiates, and what is malformed in one is an error."""

import functools
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torchvision
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import ModelCheckpoint

import qlightning
from qlightning import QConfig, QScheme
from qlightning.callbacks import PostTrainingQuantization, QuantizationAwareTraining
from qlightning.errors import ConfigError
from qlightning.observers import (
    EntropyObserver,
    FixedRangeObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    MSEObserver,
    PercentileObserver,
)
from recipes.build import build, build_callbacks, build_quantization
from recipes.data import ClassificationData, ImageNet
from recipes.float_training import train
from recipes.pipeline import run
from recipes.stages import _rates

CONF = Path(__file__).resolve().parents[1] / "conf"
OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
PACKAGES = {
    "observer": ("activation_observer", "weight_observer"),
    "qscheme": ("activation_qscheme", "weight_qscheme"),
}

STEPS = {
    "none": [],
    "equalize": ["CrossLayerEqualization"],
    "bias_correction": ["BiasCorrection"],
    "adaround": ["AdaRound"],
    "batch_norm": ["ReestimateBatchNorm"],
    "best": ["AdaRound", "BiasCorrection"],
}


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


def options(group):
    found = [option for name, option in OPTIONS if name == group]
    assert found
    return found


def test_the_groups_are_those_that_the_documents_name():
    groups = {"model", "data", "trainer", "callbacks", "observer", "qscheme", "backend", "steps", "recipe"}
    assert {group for group, _ in OPTIONS} == groups


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="/".join)
def test_every_option_composes_and_resolves(group, option):
    overrides = [f"{group}@{package}={option}" for package in PACKAGES.get(group, ())]
    config = composed(*(overrides or [f"+recipe={option}" if group == "recipe" else f"{group}={option}"]))
    assert OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("option", options("model"))
def test_every_model_builds_for_the_classes_of_the_data(option):
    config = composed(f"model={option}")
    with torch.device("meta"):
        net = build(config, "model", num_classes=7)
    last = [module for module in net.modules() if isinstance(module, torch.nn.Linear)][-1]
    assert last.out_features == 7


@pytest.mark.parametrize("option", options("data"))
def test_every_data_module_builds_or_says_how_to_get_the_set(option):
    config = composed(f"data={option}")
    if option == "digits":
        data = build(config, "data")
        assert isinstance(data, ClassificationData)
        data.setup()
        assert data.num_classes == 10
    else:
        key = "path" if config.data.path is None else "download"
        with pytest.raises(ConfigError, match=f"data.{key}="):
            build(config, "data").setup()


@pytest.mark.parametrize("option", options("trainer"))
def test_every_trainer_builds(option):
    if option == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    trainer = build(composed(f"trainer={option}"), "trainer", max_epochs=1)
    assert isinstance(trainer, pl.Trainer)
    assert trainer.world_size == (2 if option == "ddp_cpu" else 1)


@pytest.mark.parametrize("option", options("observer"))
@pytest.mark.parametrize("package", PACKAGES["observer"])
def test_every_observer_is_built_for_activations_and_weights_apart(option, package):
    cls = {
        "entropy": EntropyObserver,
        "fixed_range": FixedRangeObserver,
        "histogram": HistogramObserver,
        "minmax": MinMaxObserver,
        "moving_average": MovingAverageObserver,
        "mse": MSEObserver,
        "percentile": PercentileObserver,
    }[option]
    plain, config = composed(), composed(f"observer@{package}={option}")
    assert type(instantiate(config[package])(QScheme(signed=False))) is cls
    untouched = next(other for other in PACKAGES["observer"] if other != package)
    assert config[untouched] == plain[untouched]
    qconfig = instantiate(config.qconfig)
    assert isinstance(getattr(qconfig, package), functools.partial)
    assert getattr(qconfig, package).func is cls


@pytest.mark.parametrize("option", options("qscheme"))
@pytest.mark.parametrize("package", PACKAGES["qscheme"])
def test_every_qscheme_is_what_its_name_says(option, package):
    qconfig = instantiate(composed(f"qscheme@{package}={option}").qconfig)
    scheme = qconfig.activation if package == "activation_qscheme" else qconfig.weight
    assert isinstance(scheme, QScheme)
    assert option.startswith(f"{'int' if scheme.signed else 'uint'}{scheme.bits}_")
    assert ("symmetric" in option) is scheme.symmetric
    assert option.endswith("_per_channel") is scheme.per_channel


def test_the_schemes_without_a_choice_are_the_defaults_of_the_package():
    qconfig = instantiate(composed().qconfig)
    assert (qconfig.activation, qconfig.weight) == (QConfig().activation, QConfig().weight)


@pytest.mark.parametrize("option", options("backend"))
def test_every_backend_reaches_the_callback(option):
    try:
        _, callback = build_quantization(composed(f"backend={option}"))
    except qlightning.QuantizationError as error:
        pytest.skip(str(error))
    assert option in ("auto", callback.backend.name)


@pytest.mark.parametrize("option", options("steps"))
def test_every_chain_of_steps_reaches_the_callback(option):
    _, callback = build_quantization(composed("callbacks=ptq", f"steps={option}"))
    names = [type(step).__name__ for step in callback.steps]
    assert names == STEPS[option]


@pytest.mark.parametrize("option", options("recipe"))
def test_every_recipe_does_what_its_name_says_and_has_its_page(option):
    config = composed(f"+recipe={option}")
    net, kind, *data = option.split("_")
    assert net in (config.model.name if data else config.model._target_)
    assert f"+recipe={option}" in (CONF.parent / "recipes" / f"{net}_{kind}.md").read_text(encoding="utf-8")
    assert get_method(config.job) is {"qat": run, "ptq": run, "float": train}[kind]
    if kind == "float":
        assert [type(callback) for callback in build_callbacks(config)] == [ModelCheckpoint]
        return
    _, callback = build_quantization(config)
    assert type(callback) is {"qat": QuantizationAwareTraining, "ptq": PostTrainingQuantization}[kind]
    observer = {"qat": MovingAverageObserver, "ptq": HistogramObserver}[kind]
    assert callback.qconfig.activation_observer.func is observer
    assert config.qat_training.optimizer.lr <= config.float_training.optimizer.lr / 10


@pytest.mark.parametrize("option", [option for option in options("recipe") if option.endswith("_imagenet")])
def test_every_recipe_for_imagenet_starts_from_the_weights_of_torchvision(option, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    config = composed(f"+recipe={option}", f"data.path={tmp_path}")
    assert isinstance(build(config, "data"), ImageNet)
    assert config.model.weights in torchvision.models.get_model_weights(config.model.name).__members__
    optimizer, schedule = _rates(config, "qat_training")
    rates = optimizer([torch.nn.Parameter(torch.zeros(1))])
    scheduler = schedule(rates, 10)
    assert scheduler.get_last_lr() == [config.qat_training.optimizer.lr]
    assert config.data.batch_size * config.callbacks.quantization.get("calibration_batches", 32) >= 1024


def test_the_search_composes_as_a_run_does_and_tries_its_defaults_first():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("search", ["+recipe=resnet_ptq"])
        space = {key: values for key, values in config.search.space.items() if key != "exclude"}
        assert (
            compose("search", ["+recipe=resnet_ptq", *(f"{key}={values[0]}" for key, values in space.items())])
            == config
        )
    assert {key: config[key] for key in config if key != "search"} == composed("+recipe=resnet_ptq")
    for key, values in space.items():
        assert {(key.partition("@")[0], value) for value in values} <= set(OPTIONS)


LAUNCHERS = {"local": "joblib", "slurm": "submitit_slurm", "ray_cluster": "ray"}


@pytest.mark.parametrize("option", sorted(path.stem for path in (CONF / "hydra" / "launcher").glob("*.yaml")))
def test_every_launcher_composes_over_that_of_its_plugin(option):
    def launcher(name):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("train", [f"hydra/launcher={name}"], return_hydra_config=True).hydra.launcher

    try:
        plain = launcher(LAUNCHERS[option])
    except MissingConfigException:
        pytest.skip(f"the plugin with hydra/launcher={LAUNCHERS[option]} is not installed")
    ours = launcher(option)
    assert ours._target_ == plain._target_
    assert ours.keys() == plain.keys()
    assert ours != plain


def test_what_the_command_line_says_beats_the_recipe():
    config = composed(
        "+recipe=resnet_ptq", "model=resnet56_cifar", "observer@activation_observer=minmax", "seed=7", "data=npz"
    )
    assert config.model.depth == 56
    assert config.activation_observer._target_.endswith("MinMaxObserver")
    assert config.data._target_.endswith("Npz")
    assert config.seed == 7


@pytest.mark.parametrize("override", ["modle=resnet18", "sede=1", "callbacks.quantization.qconfg=1"])
def test_an_override_of_what_does_not_exist_is_an_error_of_hydra(override):
    with pytest.raises(ConfigCompositionException):
        composed(override)


def test_an_option_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(MissingConfigException, match=r"(?s)onednn.*reference"):
        composed("backend=fbgem")


MALFORMED = {
    "no callbacks at all": ({"callbacks": None}, "choose callbacks=qat or callbacks=ptq"),
    "an empty mapping": ({"callbacks": {}}, "choose callbacks=qat or callbacks=ptq"),
    "a list": ({"callbacks": [{"_target_": "qlightning.QuantizationAwareTraining"}]}, "a mapping"),
    "a null entry": ({"callbacks": {"quantization": None}}, "~callbacks.quantization"),
    "a misspelt _target_": (
        {"callbacks": {"quantization": {"_traget_": "qlightning.QuantizationAwareTraining"}}},
        "'_traget_' misspelt",
    ),
    "no _target_": ({"callbacks": {"quantization": {"backend": "auto"}}}, "no _target_.*backend"),
    "a class that does not exist": (
        {"callbacks": {"quantization": {"_target_": "qlightning.QuantisationAwareTraining"}}},
        "callbacks.quantization.*QuantisationAwareTraining",
    ),
    "an argument that does not exist": (
        {"callbacks": {"quantization": {"_target_": "qlightning.QuantizationAwareTraining", "freeze_observer": 1}}},
        "callbacks.quantization.*freeze_observer",
    ),
    "no callback": ({"callbacks": {"quantization": {"_target_": "torch.nn.ReLU"}}}, "ReLU, not a Lightning callback"),
    "a factory of a callback": (
        {"callbacks": {"quantization": {"_target_": "qlightning.QuantizationAwareTraining", "_partial_": True}}},
        "not a Lightning callback",
    ),
    "only others": (
        {"callbacks": {"timer": {"_target_": "pytorch_lightning.callbacks.Timer"}}},
        "0 of the callbacks .timer. quantize",
    ),
    "two that quantize": (
        {
            "callbacks": {
                "a": {"_target_": "qlightning.QuantizationAwareTraining"},
                "b": {"_target_": "qlightning.PostTrainingQuantization"},
            }
        },
        "2 of the callbacks .a, b. quantize",
    ),
    "an unknown backend": (
        {"callbacks": {"quantization": {"_target_": "qlightning.QuantizationAwareTraining", "backend": "onednnn"}}},
        "onednn",
    ),
    "an unresolved value": (
        {"callbacks": {"quantization": {"_target_": "qlightning.QuantizationAwareTraining", "backend": "${bakend}"}}},
        "bakend",
    ),
}


@pytest.mark.parametrize(("config", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_callbacks_are_an_error_and_never_a_silent_float_run(config, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_quantization(OmegaConf.create(config))


def test_a_run_whose_callbacks_are_taken_away_is_an_error():
    with pytest.raises(ConfigError, match="callbacks=qat or callbacks=ptq"):
        build_quantization(composed("~callbacks"))
    with pytest.raises(ConfigError, match="callbacks=qat or callbacks=ptq"):
        build_quantization(composed("+recipe=resnet_qat", "~callbacks.quantization"))
    with pytest.raises(ValueError, match="must be a string or a list"):  # Hydra's own, as for every group
        composed("callbacks=null")


def test_more_callbacks_go_along_with_the_one_that_quantizes():
    callbacks, quantizing = build_quantization(
        composed("+recipe=resnet_qat", "+callbacks.timer._target_=pytorch_lightning.callbacks.Timer")
    )
    assert [type(callback).__name__ for callback in callbacks] == ["QuantizationAwareTraining", "Timer"]
    assert quantizing is callbacks[0]


def test_layers_are_excluded_in_the_config():
    _, callback = build_quantization(composed("+recipe=resnet_qat", "+callbacks.quantization.exclude=[conv1,linear]"))
    assert callback.qconfig.exclude == ("conv1", "linear")
