"""What loggers get of an int8 model, as it is found in their stores.

wandb and mlflow-skinny are no part of the `dev` extra: 90 MB each, for the few tests here that skip without them.
"""

import json
import struct
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QuantizationAwareTraining, load
from qlightning.callbacks import loggers
from tests.callbacks.nets import loader, samples, task, trainer
from tests.html.documents import parse

FILES = ["net.pt2", "files/second.pt2"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_folders"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which MLflow refuses otherwise (3.17)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLFlowLogger changes it for the whole process


class Unreachable:
    """The experiment of a logger; whatever is asked of it fails."""

    def __getattr__(self, name):
        raise AttributeError(name) if name.startswith("__") else ConnectionError("no route to host")


def mlflow_logger(pl, tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow or mlflow-skinny")
    return pl.loggers.MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}")


def wandb_logger(pl, tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    return pl.loggers.WandbLogger(offline=True, save_dir=tmp_path)


def tensorboard_logger(pl, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    return pl.loggers.TensorBoardLogger(tmp_path / "tensorboard")


def mlflow_files(logger):
    """The files of the run, by their names in its store."""
    client, folders, found = logger.experiment, [None], {}
    while folders:
        for item in client.list_artifacts(logger.run_id, folders.pop()):
            if item.is_dir:
                folders.append(item.path)
            else:
                found[item.path] = Path(client.download_artifacts(logger.run_id, item.path)).read_bytes()
    return found


def wandb_records(path):
    """The records of an offline run, by kind: a log in LevelDB's format, which `wandb sync` reads."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, content, found = path.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # the end of a block, too short for a header
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # a whole record, the last part of one
            record, content = Record.FromString(content), b""
            kind = record.WhichOneof("record_type")
            found[kind].append(getattr(record, kind))
    return found


def wandb_artifacts(folder):
    """The artifacts of the one offline run below a folder."""
    import wandb

    wandb.finish()
    (path,) = folder.rglob("*.wandb")
    end = time.monotonic() + 60
    while "exit" not in wandb_records(path):  # another process writes, and finish() does not wait for the disk
        assert time.monotonic() < end, f"{path} was never complete"
        time.sleep(0.05)
    return wandb_records(path)["artifact"]


def tensorboard_events(logger):
    """The texts and the images of a run, by tag: lists of (step, bytes)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "tensors": 0}).Reload()
    texts = {
        tag.removesuffix("/text_summary"): [
            (e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }
    images = {tag: [(e.step, e.encoded_image_string) for e in events.Images(tag)] for tag in events.Tags()["images"]}
    return texts, images


def test_mlflow_gets_the_files(pl, tmp_path):
    logger, callback = mlflow_logger(pl, tmp_path), QuantizationAwareTraining(save=FILES)
    trainer(pl, tmp_path, callback, logger=logger, max_epochs=1).fit(task(pl), loader(), loader())
    found = mlflow_files(logger)
    shown = parse(found.pop("int8/report-net.html").decode()).text()
    assert all(layer.name in shown for layer in callback.report.layers)
    assert found == {f"int8/{name}": (tmp_path / name).read_bytes() for name in FILES}
    assert logger.experiment.get_run(logger.run_id).info.status == "FINISHED"


def test_wandb_gets_one_artifact_with_the_files_and_their_facts(pl, tmp_path):
    logger = wandb_logger(pl, tmp_path)
    callback, model = QuantizationAwareTraining(save=FILES), task(pl)
    run = trainer(pl, tmp_path, callback, logger=logger, max_epochs=1)
    run.fit(model, loader(), loader())
    run_id = logger.experiment.id
    (artifact,) = wandb_artifacts(tmp_path)
    assert (artifact.type, artifact.name) == ("model", f"net-{run_id}")
    facts = json.loads(artifact.metadata)
    assert (facts["backend"], facts["mode"]) == (callback.backend.name, "qat")
    assert facts["metrics"]["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]))
    stored = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert {name: path.read_bytes() for name, path in stored.items()} == {
        name: (tmp_path / name).read_bytes() for name in FILES
    }


def test_wandb_gets_the_report_alone_where_no_file_is_written(pl, tmp_path):
    logger = wandb_logger(pl, tmp_path)
    callback = QuantizationAwareTraining()
    trainer(pl, tmp_path, callback, logger=logger, max_epochs=1).fit(task(pl), loader())
    assert wandb_artifacts(tmp_path) == []
    (page,) = tmp_path.rglob("*.html")
    shown = parse(page.read_text()).text()
    assert all(layer.name in shown for layer in callback.report.layers)


def test_tensorboard_gets_the_report_and_the_codes_of_each_layer(pl, tmp_path):
    pytest.importorskip("matplotlib")
    logger, callback = tensorboard_logger(pl, tmp_path), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback, logger=logger, max_epochs=1)
    run.fit(task(pl), loader(), loader())
    texts, images = tensorboard_events(logger)
    assert list(texts) == ["int8/net"]
    ((step, text),) = texts["int8/net"]
    assert step == run.global_step
    lines = text.splitlines()
    assert all(line.startswith("    ") for line in lines)  # markdown for monospace
    assert "\n".join(line[4:] for line in lines) == str(callback.report)
    assert list(images) == [f"int8 weights/net.{layer}" for layer in ("conv1", "conv2", "fc")]
    for ((step, image),) in images.values():
        assert step == run.global_step
        assert image.startswith(b"\x89PNG")


def test_figures_are_bounded(pl, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(loggers, "FIGURES", 2)
    logger = tensorboard_logger(pl, tmp_path)
    trainer(pl, tmp_path, QuantizationAwareTraining(), logger=logger, max_epochs=1).fit(task(pl), loader())
    assert list(tensorboard_events(logger)[1]) == ["int8 weights/net.conv1", "int8 weights/net.conv2"]


def test_tensorboard_gets_the_report_alone_without_matplotlib(pl, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    logger = tensorboard_logger(pl, tmp_path)
    trainer(pl, tmp_path, QuantizationAwareTraining(), logger=logger, max_epochs=1).fit(task(pl), loader())
    texts, images = tensorboard_events(logger)
    assert list(texts) == ["int8/net"]
    assert images == {}


def test_callbacks_for_several_nets_are_told_apart(pl, tmp_path):
    model = task(pl, nn.Identity())
    model.first, model.second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 3)
    model.forward = lambda x: model.second(model.first(x).mean((2, 3)))
    logger = tensorboard_logger(pl, tmp_path)
    callbacks = [PostTrainingQuantization(modules=[name], calibration_data=loader()) for name in ("first", "second")]
    trainer(pl, tmp_path, callbacks, logger=logger).test(model, loader(), verbose=False)
    texts, images = tensorboard_events(logger)
    assert sorted(texts) == ["int8/first", "int8/second"]
    assert sorted(images) == ["int8 weights/first.0", "int8 weights/second"]


def test_each_of_several_loggers_gets_its_share(pl, tmp_path):
    known = mlflow_logger(pl, tmp_path), tensorboard_logger(pl, tmp_path)
    callback = PostTrainingQuantization(save=FILES, calibration_data=loader())
    several = [pl.loggers.CSVLogger(tmp_path / "csv"), *known]
    trainer(pl, tmp_path, callback, logger=several).test(task(pl), loader(), verbose=False)
    assert sorted(mlflow_files(known[0])) == ["int8/files/second.pt2", "int8/net.pt2", "int8/report-net.html"]
    assert list(tensorboard_events(known[1])[0]) == ["int8/net"]
    assert {path.name for path in (tmp_path / "csv").rglob("*.*")} == {"metrics.csv"}


def test_other_loggers_are_left_alone_and_nothing_is_imported_for_them(pl, tmp_path, monkeypatch):
    for name in ("mlflow", "wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it is an error

    class OwnLogger(pl.loggers.logger.DummyLogger):
        experiment = Unreachable()

    for logger in (False, [pl.loggers.CSVLogger(tmp_path), OwnLogger()]):
        callback = QuantizationAwareTraining(save="net.pt2")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*int8 model")
            trainer(pl, tmp_path, callback, logger=logger, max_epochs=1).fit(task(pl), loader())
        assert callback.saved == [tmp_path / "net.pt2"]


@pytest.mark.parametrize("name", ["MLFlowLogger", "WandbLogger", "TensorBoardLogger"])
def test_a_logger_that_fails_loses_neither_files_nor_training(pl, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Artifact=None))  # as if it were installed
    known = type(name, (pl.loggers.logger.DummyLogger,), {"experiment": Unreachable()})
    callback, model = QuantizationAwareTraining(save="net.pt2"), task(pl)
    run = trainer(pl, tmp_path, callback, logger=type("OwnLogger", (known,), {})(), max_epochs=1)
    with pytest.warns(UserWarning, match=r"OwnLogger did not take .*\(ConnectionError: no route to host\)"):
        run.fit(model, loader(), loader())
    assert run.state.finished
    x, _ = samples(8)
    assert torch.equal(load(tmp_path / "net.pt2")(x), model(x))


def test_other_ranks_log_nothing():
    logger = type("MLFlowLogger", (), {})()  # would fail
    rank_one = SimpleNamespace(is_global_zero=False, loggers=[logger])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loggers.log_outcome(rank_one, loggers.Outcome({}, None, {Path("net.pt2"): None}, Path(), 0))
