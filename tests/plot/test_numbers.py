"""Numbers in the cells of a heat map can be read on every colour."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from clearhead.plot import canvas


def light(colour) -> float:
    """WCAG's relative luminance."""
    linear = np.where(
        np.array(colour) <= 0.04045, np.array(colour) / 12.92, ((np.array(colour) + 0.055) / 1.055) ** 2.4
    )
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("diverging", [False, True])
def test_every_number_has_the_contrast_of_body_text(diverging):
    """WCAG 2.2, level AA, asks 4.5 of small text; nothing is drawn around the letters to get there."""
    table = np.linspace(-1 if diverging else 0, 1, 200).reshape(10, 20)
    figure = canvas.heatmap(
        table,
        [""] * 10,
        [""] * 20,
        "",
        "",
        low=float(table.min()),
        high=1.0,
        diverging=diverging,
        numbers=True,
    )
    image, words = figure.axes[0].images[0], figure.axes[0].texts
    colours = [image.cmap(image.norm(value))[:3] for value in table.flat]
    for colour, word in zip(colours, words, strict=True):
        dark, bright = sorted([light(colour), light(to_rgb(word.get_color()))])
        assert (bright + 0.05) / (dark + 0.05) >= 4.5
    assert {word.get_color() for word in words} == {"black", "white"}
    assert not any(word.get_path_effects() for word in words)


def test_labels_may_be_numbers():
    figure = canvas.heatmap(np.eye(2), range(2), np.array([16, 32]), "loss", "nats")
    shown = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert shown == ["16", "32"]
