"""What runs in int8 on torchvision's nets, how close it is, and what CPU time prepare and convert take.

    python scripts/bench/coverage.py [--nets resnet18 vit_b_16] [--batch 2] [--json FILE]

Random weights; BatchNorm statistics warmed up by twelve forward passes. QAT: two training steps. PTQ: two batches.
The SQNR of int8 is taken against the fake-quantized eval output and against the same weights in float.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qlightning
from qlightning.affine import sqnr
from qlightning.fake_quantize import set_fake_quant

NETS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "googlenet",
    "inception_v3",
    "squeezenet1_1",
    "mnasnet1_0",
    "densenet121",
    "regnet_y_400mf",
    "convnext_tiny",
    "vgg11_bn",
    "resnext50_32x4d",
    "vit_b_16",
    "swin_t",
    # Those of torchvision.models.quantization, in float: written for PyTorch's eager-mode quantization.
    "quantized_resnet18",
    "quantized_resnet50",
    "quantized_resnext101_32x8d",
    "quantized_mobilenet_v2",
    "quantized_mobilenet_v3_large",
    "quantized_googlenet",
    "quantized_inception_v3",
    "quantized_shufflenet_v2_x0_5",
    "quantized_shufflenet_v2_x1_0",
)
REQUIRED_DB = 30.0
REQUIRED_SECONDS = {"resnet50": 3.0, "mobilenet_v2": 3.0}
# Layers whose weights are handed to an attention function that is called in one piece.
IN_ATTENTION = {"vit_b_16": "MultiheadAttention", "swin_t": "shifted_window_attention"}


def build(name: str, batch: int) -> tuple[nn.Module, list[Tensor]]:
    """A net with random weights and warm BatchNorm statistics, and three batches."""
    torch.manual_seed(0)
    plain = name.removeprefix("quantized_")
    options = {"init_weights": True} if plain in ("googlenet", "inception_v3") else {}
    if plain != name:
        options["quantize"] = False
    net = torchvision.models.get_model(name, weights=None, **options)
    for module in net.modules():
        # torchvision starts some heads at zero, whose output says nothing.
        if isinstance(module, nn.Linear) and not bool(module.weight.any()):
            nn.init.normal_(module.weight, std=0.02)
    size = 299 if plain == "inception_v3" else 224
    batches = [torch.randn(batch, 3, size, size) for _ in range(3)]
    net.train()
    with torch.no_grad():
        for _ in range(4):
            for x in batches:
                net(x)
    return net.eval(), batches


def train(net: nn.Module, batches: list[Tensor]) -> None:
    """Two steps of SGD."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for x in batches[:2]:
        result = net(x)
        outputs = [result] if isinstance(result, Tensor) else [y for y in result if y is not None]
        loss = sum(nn.functional.cross_entropy(y, torch.arange(len(x))) for y in outputs)
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()


def measure(name: str, mode: Any, batch: int, repeats: int = 3) -> dict[str, Any]:
    """Prepares, trains or calibrates, and converts one net."""
    net, batches = build(name, batch)
    seconds_prepare = []
    for _ in range(repeats):
        fresh = copy.deepcopy(net)
        start = time.process_time()
        qlightning.prepare(fresh, mode=mode)
        seconds_prepare.append(time.process_time() - start)
    net = fresh
    if mode == "qat":
        train(net, batches)
    else:
        qlightning.calibrate(net, batches[:2])
    seconds_convert = []
    for _ in range(repeats):
        start = time.process_time()
        int8 = qlightning.convert(net)
        seconds_convert.append(time.process_time() - start)
    x = batches[2]
    with torch.no_grad():
        fake = net(x)
        set_fake_quant(net, False)
        real = net(x)
        result = int8(x)
    report = qlightning.report(int8)
    attention = IN_ATTENTION.get(name, "nothing")
    excused = [r for r in report.float_layers if attention in r.reason]
    unused = [r for r in report.float_layers if r.reason == "called in training only"]  # auxiliary classifiers
    row = {
        "net": name,
        "mode": mode,
        "layers": len(report.layers) - len(unused),
        "int8": len(report.int8_layers),
        "in_attention": len(excused),
        "prepare_s": round(statistics.median(seconds_prepare), 2),
        "convert_s": round(statistics.median(seconds_convert), 2),
        "sqnr_fake_quant": round(sqnr(fake, result), 1),
        "sqnr_float": round(sqnr(real, result), 1),
        "backend": report.backend,
    }
    limit = REQUIRED_SECONDS.get(name, float("inf"))
    row["passed"] = (
        row["int8"] + row["in_attention"] == row["layers"]
        and row["sqnr_fake_quant"] >= REQUIRED_DB
        and row["prepare_s"] + row["convert_s"] <= limit
    )
    return row


def main() -> int:
    """Prints a row for every net and mode; returns the number of rows that fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=NETS, choices=NETS, metavar="NET")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, {torch.get_num_threads()} threads, "
        f"batch {options.batch}, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    )
    print(
        f"{'net':28} {'mode':4} {'layers':>6} {'int8':>5} {'prepare s':>9} {'convert s':>9} {'dB to fake-quant':>16} "
        f"{'dB to float':>11}"
    )
    rows = []
    for name in options.nets:
        for mode in ("qat", "ptq"):
            row = measure(name, mode, options.batch)
            rows.append(row)
            print(
                f"{name:28} {mode:4} {row['layers']:6} {row['int8']:5} {row['prepare_s']:9.2f} {row['convert_s']:9.2f} "
                f"{row['sqnr_fake_quant']:16.1f} {row['sqnr_float']:11.1f}  "
                f"{'ok' if row['passed'] else 'FAILED'}"
                f"{', ' + str(row['in_attention']) + ' inside attention' if row['in_attention'] else ''}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    failed = [row for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} passed")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
