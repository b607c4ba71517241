"""The elementwise calls that the oneDNN kernels take in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from qlightning.backends.qdq import QParams
from qlightning.calls import function_name


@dataclass(frozen=True)
class PostOp:
    """The elementwise call that a kernel computes behind its sums, in the names of oneDNN.

    Attributes:
        name: The call.
        args: Its arguments behind the tensor.
        algorithm: Which of several ways to compute it.
        factor: What the sums are multiplied by before it.
        offset: What is added to them then.
    """

    name: str = "none"
    args: tuple[float, ...] = ()
    algorithm: str = ""
    factor: float = 1.0
    offset: float = 0.0


SUM_POST_OPS = (PostOp(), PostOp("relu"))


def kernel_name(kernel: str, post: PostOp, out: QParams | None) -> str:
    """What the report calls a kernel."""
    fused = "" if post.name == "none" else "+hardsigmoid" if post.offset else f"+{post.name}"
    return f"onednn {kernel}{fused} to {'float32' if out is None else 'uint8'}"


def find_post_op(post: list[fx.Node], out: QParams | None, linear: bool) -> PostOp | None:
    """The elementwise calls behind a kernel as it takes them; None where it has none."""
    if len(post) > 1:
        return None
    name = function_name(post[0].target) if post else "none"
    found = PostOp(name, tuple(float(a) for a in post[0].args[1:]) if post else ())  # type: ignore[arg-type]
    if name == "silu":
        found = PostOp("swish")
    elif name == "hardsigmoid":
        found = PostOp("hardtanh", (0.0, 1.0), factor=1 / 6, offset=0.5)
    elif name == "gelu" and linear:
        found = replace(found, algorithm=str(post[0].kwargs.get("approximate", "none")))
    allowed = ("none", "relu", "hardtanh", "hardswish", "swish", *(("gelu", "tanh", "leaky_relu") if linear else ()))
    if found.name not in allowed:
        return None
    if out is not None and (out.quant_min, out.quant_max) != (0, 255):
        # The kernel saturates at 0 and 255; a narrower grid needs its ends as a clamp.
        low, high = (out.quant_min - out.zero_point) * out.scale, (out.quant_max - out.zero_point) * out.scale
        if found.name == "relu":
            low = max(low, 0.0)
        elif found.name == "hardtanh":
            low, high = max(low, found.args[0]), min(high, found.args[1])
        elif found.name != "none":
            return None
        return replace(found, name="hardtanh", args=(low, high))
    return found
