"""From what the benchmarks have written to the numbers in ``README.md``.

python scripts/bench/render_front.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.accuracy import means
from scripts.bench.markdown import head, line

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- numbers: written by scripts/bench/render_front.py -->", "<!-- /numbers -->"
CASE = {"batch": 1, "threads": 1}
NETS = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "mobilenet_v3_large": "MobileNetV3-Large"}
TRAINED = {
    "resnet20": "ResNet-20",
    "resnet56": "ResNet-56",
    "mobilenet_v2_half": "MobileNetV2, half width",
    "mobilenet_v3_half": "MobileNetV3-Large, half width",
}
SPEED = {
    "openvino": "**qlightning, `openvino`**",
    "onednn": "**qlightning, `onednn`**",
    "OpenVINO, NNCF": "NNCF + OpenVINO",
    "ONNX Runtime, static": "ONNX Runtime",
    "torch.ao FX, x86": "torch.ao FX",
}
ACCURACY = {
    "qlightning, onednn": "**qlightning**",
    "torch.ao FX, full 8-bit ranges": "torch.ao FX, full ranges",
    "torch.ao FX, x86 default": "torch.ao FX, default",
    "ONNX Runtime, percentile": "ONNX Runtime, percentile",
    "NNCF + OpenVINO, batches": "NNCF + OpenVINO, batches",
    "NNCF + OpenVINO, default, single images": "NNCF + OpenVINO, default",
}


def numbers() -> str:
    """What stands between the two marks."""
    folder = ROOT / "docs" / "benchmarks"
    accuracy, speed = (json.loads((folder / f"{name}.json").read_text()) for name in ("accuracy", "int8"))
    return "\n".join([BEGIN, "", *_accuracy(accuracy), "", *_speed(speed), "", END])


def _accuracy(record: dict[str, Any]) -> Iterator[str]:
    nets = [row["net"] for row in record["nets"] if any(r["net"] == row["net"] for r in record["rows"])]
    (images,) = {row["images"] for row in record["nets"]}
    yield f"Post-training quantization with default settings, {images:,} test images of CIFAR-10, 512 to calibrate,"
    yield "three seeds: predictions that are the float net's, and the SQNR of the logits"
    yield "([all tools and figures, the drop of accuracy too](docs/accuracy.md))."
    yield ""
    yield from head([""], [TRAINED.get(net, net) for net in nets])
    for tool, name in ACCURACY.items():
        cells = []
        for net in nets:
            found = [means(record["rows"], net, figure).get(tool) for figure in ("agreement", "sqnr_db")]
            cells.append("-" if None in found else f"{found[0]:.2f} %, {found[1]:.1f} dB")
        yield line([name, *cells])


def _speed(record: dict[str, Any]) -> Iterator[str]:
    yield "Times as fast as the float net in eager torch, 224x224, one image a call, one thread, by CPU time"
    yield "([all cases, and the cost of training](docs/benchmarks.md))."
    yield ""
    yield from head([""], list(NETS.values()))
    for runner, name in SPEED.items():
        cells = []
        for net in NETS:
            rows = [r for r in record["rows"] if (r["net"], r["runner"]) == (net, runner) and CASE.items() <= r.items()]
            cells.append(f"{statistics.fmean(r['times_as_fast_as']['float'][0] for r in rows):.1f}" if rows else "-")
        yield line([name, *cells])


def main() -> None:
    """Writes the numbers into the README."""
    path = ROOT / "README.md"
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(before + numbers() + after)


if __name__ == "__main__":
    main()
