"""Small nets with all that exports meet, trained enough that their logits say something."""

import torch
from torch import nn

import qlightning
from tests.callbacks.nets import samples

CLASSES = 3


class Small(nn.Module):
    """conv-bn-relu6, depthwise, residual sum, squeeze-and-excitation, hardswish, concatenation, linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8))
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.act, self.pool = nn.Hardswish(), nn.MaxPool2d(2)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.act(self.depthwise(x))
        weights = nn.functional.adaptive_avg_pool2d(x, 1)
        x = self.pool(x * torch.sigmoid(self.excite(torch.relu(self.squeeze(weights)))))
        return self.fc(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))


class Encoder(nn.Module):
    """Linear layers between what stays float: attention, LayerNorm, GELU; two inputs, a dict as the result."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mix = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens, shift):
        x = self.embed(tokens) + shift
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        x = x + nn.functional.gelu(self.mix(x))
        return {"logits": self.head(x.mean(1)), "features": x}


def trained(net=None, steps=60):
    """A net that tells the classes of `samples` apart, in eval mode."""
    torch.manual_seed(0)
    net = Small() if net is None else net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        x, y = samples(32, seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


def small_int8(backend=None):
    """The int8 form for a backend of one and the same prepared net."""
    prepared = qlightning.prepare(trained(), mode="ptq")
    qlightning.calibrate(prepared, [samples(32, seed=100 + i)[0] for i in range(4)])
    return qlightning.convert(prepared, backend=backend)


def encoder_int8(backend="auto"):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 5, 8), torch.randn(4, 1, 16)) for _ in range(3)]
    return qlightning.quantize_model(Encoder().eval(), batches, backend=backend), batches[0]
