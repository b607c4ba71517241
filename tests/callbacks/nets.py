"""The small net, data and LightningModules that the tests of the callbacks share."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 3


class Net(nn.Module):
    """conv-bn-relu, conv-bn-add-relu, linear; with an attribute and a method that its users rely on."""

    def __init__(self, width=8):
        super().__init__()
        self.num_classes = CLASSES
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, CLASSES)

    def features(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(x))).mean((2, 3))

    def forward(self, x):
        return self.fc(self.features(x))

    def loss(self, logits, target):
        return nn.functional.cross_entropy(logits, target)


def samples(count, *, scale=1.0, seed=0):
    """Images whose class is the channel that is brightest."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    x = torch.randn(count, 3, 8, 8, generator=generator) * 0.5
    x[torch.arange(count), y] += 1
    return x * scale, y


def loader(count=32, batch_size=8, **options):
    return DataLoader(TensorDataset(*samples(count, **options)), batch_size=batch_size)


def task(pl, net=None):
    """A LightningModule of a package around a net."""

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net if net is not None else Net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self.log("val_loss", nn.functional.cross_entropy(logits, y))
            self.log("val_acc", (logits.argmax(1) == y).float().mean())

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Task()


def trainer(pl, tmp_path, callbacks, **options):
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        **options,
    }
    return pl.Trainer(callbacks=callbacks, **options)


def state_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
