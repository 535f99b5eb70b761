"""Fields that differ from layer to layer: which of them have a sliding window, and which do not rotate."""

from clearhead.core.config import MOST_LAYERS, ModelConfig
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.files import refuse


def rope_skips(key: str, interval_key: str, interval: int) -> ConfigPart:
    """Return the part for layers that do not rotate: a list with 0 for each of them, or every n-th layer."""

    def read(theirs: Json) -> Json:
        every, layers = theirs.get(interval_key) or interval, count_layers(theirs)
        rotates = theirs.get(key) or [(layer + 1) % every for layer in range(layers)]
        return {"rope_skips": tuple(layer for layer, yes in enumerate(rotates[:layers]) if not yes)}

    def write(config: ModelConfig) -> Json:
        return {key: [int(layer not in config.rope_skips) for layer in range(config.n_layers)]}

    return ConfigPart(read, write)


def sliding_windows(
    pattern: int | None = None,
    default: int | None = None,
    switch: str | None = None,
    full_below: str | None = None,
    below: int = 0,
    pattern_key: str | None = None,
    skips: ConfigPart | None = None,
) -> ConfigPart:
    """Return the part for sliding windows: one width, and the layers that have it.

    Args:
        pattern: where config.json has no `layer_types`, every pattern-th layer is full; None: no layer is.
        default: the width where config.json does not state it.
        switch: a key that must be true for there to be any window.
        full_below: a key with the number of first layers that are full.
        below: that number where the key is absent.
        pattern_key: a key with the pattern.
        skips: the part with the layers that do not rotate: those have the window. With it, `layer_types`
            need no switch.
    """
    varies = pattern is not None or switch is not None  # else `layer_types` has nothing to say

    def slides_by_default(config_json: Json, layer: int) -> bool:
        if skips is not None:
            return layer in skips.read(config_json)["rope_skips"]
        if full_below is not None:
            return bool(layer >= config_json.get(full_below, below))
        every = config_json.get(pattern_key, pattern) if pattern_key is not None else pattern
        return every is None or (layer + 1) % every != 0

    def read(config_json: Json) -> Json:
        width, kinds = config_json.get("sliding_window", default), config_json.get("layer_types")
        if switch is not None and (skips is None or kinds is None) and not config_json.get(switch, False):
            width = None
        refuse(
            width is not None and width < 1,
            f"config.json has sliding_window {width}: it must be 1 at least, or null",
        )
        unknown = sorted({*(kinds or ())} - {"sliding_attention", "full_attention"})
        refuse(unknown, f"config.json has layer_types {unknown[:1]}: only sliding and full are supported")
        if kinds is not None:
            slides = [kind == "sliding_attention" for kind in kinds]
            refuse(
                (not varies and width is not None and not all(slides)) or (width is None and any(slides)),
                f"config.json has sliding_window {width} and other layer_types: leave one of them out",
            )
        else:
            slides = [
                width is not None and slides_by_default(config_json, layer)
                for layer in range(count_layers(config_json))
            ]
        if all(slides) or not any(slides):
            return {"window": width if any(slides) else None}
        return {"window": tuple(width if yes else None for yes in slides)}

    def write(config: ModelConfig) -> Json:
        assert config.decoder is not None
        windows = config.decoder.windows
        sliding = [layer for layer, window in enumerate(windows) if window is not None]
        without = None if pattern is None else default
        written: Json = {"sliding_window": windows[sliding[0]] if sliding else without}
        if varies:
            written["layer_types"] = [
                "full_attention" if window is None else "sliding_attention" for window in windows
            ]
        if switch is not None:
            written[switch] = bool(sliding)
        if full_below is not None:
            written[full_below] = sliding[0] if sliding else len(windows)
        return written

    return ConfigPart(read, write)


def near_and_far(width: int, every: int) -> ConfigPart:
    """Return the part for an encoder whose layers see all, or half of `local_attention` to each side.

    Args:
        width: local_attention, where config.json does not say.
        every: global_attn_every_n_layers, where config.json says neither that nor `layer_types`.
    """

    def read(config_json: Json) -> Json:
        half = config_json.get("sliding_window")  # counts before local_attention
        half = config_json.get("local_attention", width) // 2 if half is None else half
        refuse(half < 1, f"config.json has a window of {half} to each side: it must be 1 at least")
        often = config_json.get("global_attn_every_n_layers", every)
        kinds = config_json.get("layer_types") or [
            "sliding_attention" if layer % often else "full_attention"
            for layer in range(count_layers(config_json))
        ]
        unknown = sorted({*kinds} - {"sliding_attention", "full_attention"})
        refuse(unknown, f"config.json has layer_types {unknown[:1]}: only sliding and full are supported")
        windows = tuple(half + 1 if kind == "sliding_attention" else None for kind in kinds)
        return {"window": windows if any(windows) else None}

    def write(config: ModelConfig) -> Json:
        windows = config.main.windows
        sizes = [window for window in windows if window is not None]
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return {"local_attention": 2 * (sizes[0] - 1) if sizes else width, "layer_types": kinds}

    return ConfigPart(read, write)


def count_layers(config_json: Json) -> int:
    """Return the number of layers that config.json states."""
    layers = int(config_json["num_hidden_layers"])
    refuse(layers > MOST_LAYERS, f"config.json has num_hidden_layers {layers:,}: {MOST_LAYERS:,} is the most")
    return layers
