import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recipes.schedule import warmup_cosine
from recipes.task import ClassificationTask


def test_a_teacher_is_learnt_from_and_is_no_part_of_the_task(monkeypatch):
    net, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    task = ClassificationTask(net, 3, teacher=teacher)
    assert not any(parameter is teacher.weight for parameter in task.parameters())
    assert set(task.state_dict()) == {"net.weight", "net.bias"}
    images = torch.randn(5, 4)
    expected = (teacher(images).softmax(1) * (teacher(images).log_softmax(1) - net(images).log_softmax(1))).sum() / 5
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    loss = task.training_step((images, torch.zeros(5)), 0)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert net.weight.grad is not None
    assert teacher.weight.grad is None


def test_accuracy_is_the_fraction_of_all_images_however_they_are_batched():
    net = nn.Identity()
    logits, labels = torch.eye(3)[[0, 1, 2, 0, 1]], torch.tensor([0, 1, 2, 1, 1])
    loader = DataLoader(TensorDataset(logits, labels), batch_size=3)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    assert round(trainer.test(ClassificationTask(net, 3), loader, verbose=False)[0]["test/accuracy"], 6) == 0.8


def test_the_rate_rises_in_a_line_and_falls_along_half_a_cosine_to_zero():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warmup_cosine(optimizer, total_steps=10, warmup=0.4)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.2, 0.4, 0.6, 0.8, *(0.5 + 0.5 * torch.cos(torch.linspace(0, torch.pi, 7))).tolist()]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected), atol=1e-6, rtol=0)
