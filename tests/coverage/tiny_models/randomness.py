"""Switches off randomness in training mode: dropout, drop path, label dropout."""

from __future__ import annotations

import re

from torch import nn

# Attributes of modules: `p` of `nn.Dropout`, `drop_prob` of drop path, `dropout_prob` of label embeddings, ...
CHANCE = re.compile(r"drop|^p$|layerdrop|jitter")


def calm(model: nn.Module) -> nn.Module:
    """Set the attributes of modules that are probabilities of dropping to zero. Returns the model."""
    for module in model.modules():
        chances = [name for name, value in vars(module).items() if isinstance(value, float) and CHANCE.search(name)]
        for name in chances:
            setattr(module, name, 0.0)
    return model
