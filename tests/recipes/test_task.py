import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recipes.schedule import warmup_cosine
from recipes.task import ClassificationTask


def test_a_teacher_is_learnt_from_and_is_no_part_of_the_task(monkeypatch):
    net, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2))
    task = ClassificationTask(net, 3, teacher=teacher)
    assert not any(parameter is teacher[1].weight for parameter in task.parameters())
    assert set(task.state_dict()) == {"net.1.weight", "net.1.bias"}
    seen = []
    teacher.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    images = torch.randn(5, 1, 2, 2)
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    loss = task.training_step((images, torch.zeros(5)), 0)
    (mixed,) = seen
    answers = teacher(mixed)
    expected = (answers.softmax(1) * (answers.log_softmax(1) - net(mixed).log_softmax(1))).sum() / 5
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert net[1].weight.grad is not None
    assert teacher[1].weight.grad is None


def test_with_a_teacher_half_of_a_batch_lies_between_two_of_its_images(monkeypatch):
    seen = []
    net, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(2, 3)) for _ in range(2))
    task = ClassificationTask(net, 3, teacher=teacher)
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    angles = torch.arange(8) * (2 * torch.pi / 8)
    images = torch.stack((angles.cos(), angles.sin()), 1).view(8, 2, 1, 1)  # on a circle: nothing between is on it
    task.training_step((images, torch.zeros(8)), 0)
    assert torch.equal(seen[0][:4], images[:4])
    radii = seen[0][4:].flatten(1).norm(dim=1)
    assert (radii <= 1 + 1e-6).all()
    assert (radii < 1 - 1e-3).any()


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
