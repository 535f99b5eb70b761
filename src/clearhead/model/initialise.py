"""Initialisation by name. Biases begin at 0 and norms at 1; the names differ in the spread of the weights.

xavier      uniform within sqrt(6 / (in + out)); tables normal with standard deviation d_model^-1/2
gpt2        normal with init_std, divided by sqrt(writes) in the layers that write to the residual stream
bert        normal with init_std
"""

import math

from torch import nn

from clearhead.config import ModelConfig
from clearhead.model.attention import Attention
from clearhead.model.feedforward import FeedForward
from clearhead.model.fronts import PatchFront


def initialise(model: nn.Module, config: ModelConfig) -> None:
    """Draw the weights of every linear layer, convolution and table from torch's global generator."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Conv1d):
            if config.init == "xavier":
                nn.init.xavier_uniform_(part.weight)
            else:
                nn.init.normal_(part.weight, std=config.init_std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            std = config.d_model**-0.5 if config.init == "xavier" else config.init_std
            nn.init.normal_(part.weight, std=std)
        elif isinstance(part, PatchFront) and part.class_token is not None:
            nn.init.normal_(part.class_token, std=config.init_std)
    if config.init == "gpt2":
        for spec, stack in ((config.encoder, model.encoder), (config.decoder, model.decoder)):
            if spec is None or not isinstance(stack, nn.Module):
                continue
            writes = spec.n_layers * (3 if spec.cross else 2)
            for part in stack.modules():
                if isinstance(part, Attention | FeedForward):
                    writer = part.out if isinstance(part, Attention) else part.down
                    nn.init.normal_(writer.weight, std=config.init_std / math.sqrt(writes))
