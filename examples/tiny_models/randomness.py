"""Random numbers of the training mode set to zero: dropout, drop path, label dropout."""

from __future__ import annotations

import re

from torch import nn

# Attributes of modules: `p` of `nn.Dropout`, `drop_prob` of drop path, `dropout_prob` of label embeddings, ...
CHANCE = re.compile(r"drop|^p$|layerdrop|jitter")


def calm(model: nn.Module) -> nn.Module:
    """Sets to zero the attributes of modules that give the chance to drop something. Returns the model."""
    for module in model.modules():
        chances = [name for name, value in vars(module).items() if isinstance(value, float) and CHANCE.search(name)]
        for name in chances:
            setattr(module, name, 0.0)
    return model
