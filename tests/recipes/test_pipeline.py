import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from qlightning.errors import ConfigError
from recipes import metrics
from recipes.models import resnet_cifar
from recipes.pipeline import run
from recipes.sweep import Run, collect, comparison

ROOT = Path(__file__).resolve().parents[2]
FAST = ("trainer=fast", "float_training.epochs=1", "qat_training.epochs=1", "data.size=8", "backend=reference")
RECIPES = sorted(
    path.stem for path in (ROOT / "conf" / "recipe").glob("*_[pq][ta][qt].yaml")
)  # those that quantize, here


def small(name):
    more = ("callbacks.quantization.calibration_batches=2",) if name.endswith("ptq") else ()
    model = ("model.depth=8",) if name.startswith("resnet") else ("model.width_mult=0.25",)
    return (f"+recipe={name}", *FAST, *more, *model)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs a recipe once, and gives its folder."""
    folders = {}

    def folder_of(name, compose_run):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            run(compose_run(*small(name)), folders[name])
        return folders[name]

    return folder_of


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_leaves_its_figures_and_its_config(finished, compose_run, name, capsys):
    folder = finished(name, compose_run)
    shown = capsys.readouterr().out
    result = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert set(result) >= {"float", "fake_quant", "int8", "int8_layers", "float_layers", "versions"}
    assert set(result["float"]) == {"accuracy", "size_mb", "latency_ms"}
    assert set(result["fake_quant"]) == {"accuracy"}
    assert set(result["int8"]) == {"accuracy", "size_mb", "latency_ms", "backend"}
    for kind in ("float", "fake_quant", "int8"):
        assert 0 <= result[kind]["accuracy"] <= 1
    assert result["int8"]["size_mb"] < 0.5 * result["float"]["size_mb"]
    assert result["int8"]["backend"] == "reference"
    assert result["float_layers"] == 0
    assert result["int8_layers"] == (53 if name.startswith("mobilenet") else 8)
    assert result["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert result["versions"]["threads"] == torch.get_num_threads()
    config = OmegaConf.load(folder / "config.yaml")
    assert OmegaConf.to_container(config, resolve=False) == OmegaConf.to_container(config, resolve=True)
    assert config.seed == 0
    assert "fake-quantized" in shown
    assert f"{100 * result['int8']['accuracy']:.2f} %" in shown


def test_a_run_gives_the_same_accuracies_again(finished, compose_run, tmp_path):
    first = json.loads((finished("resnet_qat", compose_run) / "metrics.json").read_text(encoding="utf-8"))
    second = run(compose_run(*small("resnet_qat")), tmp_path)
    for kind in ("float", "fake_quant", "int8"):
        assert first[kind]["accuracy"] == second[kind]["accuracy"]


def test_a_run_starts_from_the_float_weights_of_another(finished, compose_run, tmp_path):
    folder = finished("resnet_qat", compose_run)
    result = run(compose_run(*small("resnet_ptq"), f"model.weights={folder / 'float.safetensors'}"), tmp_path)
    first = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert result["float"]["accuracy"] == first["float"]["accuracy"]
    assert not (tmp_path / "float.safetensors").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["callbacks.quantization._target_=torch.nn.ReLU"], "callbacks.quantization"),
        (["model.weights=missing.safetensors"], "No weights at"),
        (["data._target_=recipes.data.Npz", "~data.size", "+data.path=missing.npz"], "missing.npz"),
        (["+trainer.max_epoch=1"], "trainer.*max_epoch"),
        (["trainer.devices=2"], "trainer: 2 processes by DDPStrategy.*trainer=ddp_cpu"),
        (["+qat_training.optimizer.momentun=0.9"], "qat_training.*momentun"),
        (["qat_training.optimizer.lr=-1"], "qat_training.*-1"),
        (["qat_training.schedule=null"], "qat_training.schedule"),
        (["+qconfig.weigth=1"], "weigth"),
        (["+callbacks.quantization.exclude=[net.linea]"], "net.linea.*Did you mean"),
        (["activation_observer._target_=qlightning.observers.Minmax"], "Minmax"),
    ],
)
def test_what_is_wrong_in_the_config_is_an_error_before_any_training(
    compose_run, tmp_path, monkeypatch, overrides, message
):
    monkeypatch.setattr("pytorch_lightning.Trainer.fit", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run(compose_run(*small("resnet_qat"), *overrides), tmp_path)


def test_published_weights_reproduce_their_accuracy(compose_run, shared_data, tmp_path):
    weights = shared_data / "weights" / "resnet20_cifar10.safetensors"
    overrides = [f"model.weights={weights}", "data=npz", f"data.path={shared_data / 'cifar10.npz'}"]
    fast = ["+trainer.limit_test_batches=4", "+trainer.enable_progress_bar=false"]
    result = run(
        compose_run("+recipe=resnet_ptq", "callbacks.quantization.calibration_batches=2", *overrides, *fast), tmp_path
    )
    assert result["float"]["accuracy"] == pytest.approx(0.92, abs=0.02)  # of the first 1000 images
    assert result["int8"]["accuracy"] >= result["float"]["accuracy"] - 0.01


@pytest.mark.slow
def test_published_weights_lose_at_most_fifteen_hundredths_of_a_point(compose_run, shared_data, tmp_path):
    weights = shared_data / "weights" / "resnet20_cifar10.safetensors"
    overrides = [f"model.weights={weights}", "data=npz", f"data.path={shared_data / 'cifar10.npz'}"]
    result = run(compose_run("+recipe=resnet_ptq", *overrides), tmp_path)
    assert result["float"]["accuracy"] == 0.9173
    assert result["int8"]["accuracy"] >= 0.9173 - 0.0015


def of_sweep(folder, *arguments):
    """Runs scripts/train.py as a sweep, and gives what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "-m", *arguments, f"hydra.sweep.dir={folder}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_sweep_ends_in_one_table_of_its_runs(tmp_path):
    sweep = "observer@activation_observer=minmax,moving_average"
    shown = of_sweep(tmp_path, *small("resnet_ptq"), sweep)
    runs = collect(tmp_path)
    names = [run.overrides["observer@activation_observer"] for run in runs]
    assert names == ["minmax", "moving_average"]
    end = shown.splitlines()[-12:]
    for name, one in zip(names, runs, strict=True):
        row = next(line for line in end if name in line)
        assert all(figure in row for figure in metrics.summary(one.metrics))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_processes_that_train_start_no_sweep_of_their_own(finished, compose_run, tmp_path):
    weights = f"model.weights={finished('resnet_qat', compose_run) / 'float.safetensors'}"
    two = ("trainer=ddp_cpu", *(f"+trainer.limit_{kind}_batches=2" for kind in ("train", "val", "test")))
    fork = ("trainer.strategy=ddp_fork", "callbacks.quantization.save=[net.safetensors]")  # starts faster than spawn
    shown = of_sweep(tmp_path, *small("resnet_qat"), *two, *fork, weights, "seed=0,1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "multirun.yaml"]
    runs = collect(tmp_path)
    assert [run.overrides["seed"] for run in runs] == ["0", "1"]
    for number, one in enumerate(runs):
        assert one.metrics["int8_layers"] == 8
        assert (tmp_path / str(number) / "net.safetensors").exists()
    assert shown.count("after") == 2  # each run says once how long it took


@pytest.mark.slow
def test_a_sweep_runs_side_by_side_and_ends_in_the_same_table(finished, compose_run, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    weights = f"model.weights={finished('resnet_qat', compose_run) / 'float.safetensors'}"
    of_sweep(tmp_path, *small("resnet_ptq"), weights, "hydra/launcher=local", "data.calibration_seed=0,1")
    assert [run.overrides["data.calibration_seed"] for run in collect(tmp_path)] == ["0", "1"]


def test_the_table_of_a_sweep_shows_what_differs_and_nothing_else():
    figures = {"accuracy": 0.5, "size_mb": 1.0, "latency_ms": 2.0}
    kinds = dict.fromkeys(("float", "fake_quant", "int8"), figures)
    runs = [Run({"seed": "0", "model": "a"}, kinds), Run({"seed": "0", "model": "b", "+x": "1"}, kinds)]
    headers = [column.header for column in comparison(runs).columns]
    assert headers[:3] == ["model", "+x", "float"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_of_a_page_are_those_of_a_run(name):
    result = json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    page = (ROOT / "recipes" / f"{name}.md").read_text(encoding="utf-8")
    for row in metrics.rows(result):
        assert f"| {' | '.join(row)} |" in page
    assert f"{result['seconds']:.0f} s" in page
    assert f"torch {result['versions']['torch']}" in page
    assert f"{result['versions']['threads']} threads" in page
    assert result["versions"]["cpu"] in page


def test_size_is_what_the_state_dict_takes_on_disk(tmp_path):
    net = resnet_cifar(8)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert metrics.size_mb(net) == pytest.approx((tmp_path / "net.pt").stat().st_size / 1e6, rel=0.01)


def test_latency_is_the_median_of_each_model_and_the_models_take_turns():
    calls = []

    class Net(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            calls.append(self.name)
            return x

    result = metrics.latency_ms({name: Net(name) for name in "ab"}, torch.zeros(1), rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert result.keys() == {"a", "b"}
    assert all(value > 0 for value in result.values())
