"""Checks of conditional depth: where a router may send some tokens past a layer."""

from clearhead.core.config.fields import Fields
from clearhead.errors import ConfigError, refuse

BY_LENGTH = ("dynamic", "longrope")  # rotary scalings whose angles depend on the longest row


def check_depth(config: Fields) -> None:
    """Refuse shares that are none, and routers where they have no meaning."""
    given = config.depth_capacity
    shares = given if isinstance(given, tuple) else (given,)
    for share in shares:
        refuse(
            not 0 < share <= 1,
            f"depth_capacity {share} is no share of the tokens: choose above 0, up to 1 (all of them)",
            ConfigError,
        )
    if all(share == 1 for share in shares):
        return
    said, scaling = f"depth_capacity {given}", config.rope_scaling
    rules = [
        (
            given is not shares and config.n_layers == 1,
            "is for every second layer, and there is one: give a tuple, or more layers",
        ),
        (
            config.family == "encoder-decoder",
            "has no place for cross-attention, which every token needs: choose family decoder or encoder",
        ),
        (
            config.norm_position == "post",
            "scales what a layer adds to the stream, and a post-norm layer replaces it: "
            "choose norm_position pre, sandwich or output",
        ),
        (
            "global" in str(config.attention),
            "may leave out tokens that attention global gives to all: choose another kind, or no routers",
        ),
        (config.n_experts, "and n_experts are two routers in one layer: leave one of them out"),
        (
            config.layer_groups not in (None, config.n_layers),
            "needs a router for each layer, and layer_groups shares them: leave one of them out",
        ),
        (
            scaling is not None and scaling.kind in BY_LENGTH,
            f"and rope scaling {scaling and scaling.kind}, which turns keys by the longest row: "
            "leave one of them out",
        ),
    ]
    for mistake, line in rules:
        refuse(mistake, f"{said} {line}", ConfigError)
