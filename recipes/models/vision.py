"""torchvision's models by name."""

from __future__ import annotations

from pathlib import Path

import torchvision
from torch import nn

from qlightning.errors import ConfigError, closest
from recipes.models.weights import is_weights_file, load_weights


def torchvision_model(
    name: str, num_classes: int = 1000, weights: str | Path | None = None, new_head: bool = False
) -> nn.Module:
    """Builds a classification model of torchvision through its own builder.

    Args:
        name: As torchvision lists it, such as ``resnet18``.
        num_classes: Width of the last layer.
        weights: None for random ones, a torchvision name such as ``IMAGENET1K_V1`` (fetched at first use, then cached),
            or a file (see ``load_weights``).
        new_head: Where torchvision's weights are for another number of classes, leave the last layer random, to be
            trained.

    Raises:
        ConfigError: The model or the weights are unknown, or made for another number of classes without ``new_head``.

    Examples:
        >>> torchvision_model("resnet18", num_classes=10).fc.out_features
        10
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise ConfigError(f"torchvision has no model {name!r}.{closest(name, known)} It lists {', '.join(known)}.")
    if weights is None or is_weights_file(weights):
        net = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
        return net if weights is None else load_weights(net, weights)

    choices = torchvision.models.get_model_weights(name)
    if weights not in choices.__members__:
        raise ConfigError(
            f"torchvision has no weights {weights!r} for {name}: {', '.join(choices.__members__)} are there; "
            "a path of a file (.safetensors, .ckpt, .pt) and null (random) are possible too."
        )
    entry = choices[str(weights)]
    trained_for = len(entry.meta["categories"])
    if trained_for == num_classes:
        return torchvision.models.get_model(name, weights=entry)
    if not new_head:
        raise ConfigError(
            f"The weights {weights} of {name} are for {trained_for} classes, the data has {num_classes}: ask for a new "
            "last layer with +model.new_head=true and train it with float_training.finetune=true."
        )
    net = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    shapes = {key: value.shape for key, value in net.state_dict().items()}
    state = {
        key: value for key, value in entry.get_state_dict(progress=False).items() if value.shape == shapes.get(key)
    }
    net.load_state_dict(state, strict=False)
    return net
