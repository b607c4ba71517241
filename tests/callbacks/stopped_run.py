"""What test_stopped_runs.py runs in processes of its own.

``python stopped_run.py stop DIRECTORY WAY@STEP...`` trains once for each argument, in a child that stops that way
(kill, term or raise) in the middle of that step; with ``resume`` in the place of ``stop`` it goes on from the last
checkpoint of each, and leaves where it ended in ``DIRECTORY/WAY@STEP/end.pt``.
"""

import os
import signal
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

from qlightning import QuantizationAwareTraining
from qlightning.fake_quantize import fake_quantizers
from tests.callbacks.nets import Net, samples, state_of, task, trainer

BATCHES, EPOCHS = 5, 4
"""Of a run; phases change before steps 2, 10 and 15 of the 20."""

NEVER_STOPPED = 77
"""The exit status of a child that came to its end."""


class Numbered(type(task(pl))):
    """A batch depends on its number alone: Lightning does not wind a loader forward that is resumed in an epoch."""

    def __init__(self, stop=None, net=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.stop = net or Net(), stop

    def training_step(self, batch, batch_idx):
        number = self.trainer.current_epoch * BATCHES + batch_idx
        loss = super().training_step(samples(8, seed=number), batch_idx)
        if self.stop is not None and number == self.stop[1]:
            stop(self.stop[0])
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(BATCHES))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(8, seed=99)), batch_size=8)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def stop(way):
    if way == "raise":
        raise ZeroDivisionError("in the middle of a step")
    os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGTERM)


def run(directory, stop=None, ckpt_path=None):
    """A training; returns all that it ended with."""
    callback = QuantizationAwareTraining(fake_quant_start="2 steps", freeze_observers=0.5, freeze_bn=0.75)
    saver = pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    ends = {}

    class Watch(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            ends["flags"] = {
                name: (fq.observed, fq.observer_enabled, fq.fake_quant_enabled, sorted(fq.seen_ndims))
                for name, fq in fake_quantizers(pl_module)
            }
            ends["modes"] = {name: m.training for name, m in pl_module.named_modules() if isinstance(m, nn.BatchNorm2d)}
            ends["stage"] = float(trainer.progress_bar_metrics["qat/stage"])

    model = Numbered(stop)
    fit = trainer(pl, directory, [callback, saver, Watch()], enable_checkpointing=True, max_epochs=EPOCHS)
    fit.fit(model, ckpt_path=ckpt_path)
    return {
        **ends,
        "steps": fit.global_step,
        "prepared": state_of(callback.prepared["net"]),
        "int8": state_of(callback.int8_model),
        "optimizer": fit.optimizers[0].state_dict(),
        "scheduler": fit.lr_scheduler_configs[0].scheduler.state_dict(),
        "callback": callback.state_dict(),
    }


def last_checkpoint(directory):
    return max(Path(directory).glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))


def main(what, directory, *names):
    torch.set_num_threads(1)
    for name in names:
        below = Path(directory) / name
        way, step = name.split("@")
        if what == "resume":
            torch.save(run(below / "resumed", ckpt_path=last_checkpoint(below)), below / "end.pt")
        elif child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (below / "status").write_text(str(status))
        else:
            run(below, (way, int(step)))
            os._exit(NEVER_STOPPED)


if __name__ == "__main__":
    main(*sys.argv[1:])
