"""Numbers in the cells of a heat map can be read on every colour."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgb

import clearhead as ch
from clearhead.app import plot as canvas
from clearhead.app.plot.prompts import draw_lens
from clearhead.learn.training.events import LOG, draw  # now: the suite replaces it by nothing
from tests.harness import build, some_ids


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
    options = {"low": float(table.min()), "high": 1.0, "diverging": diverging, "numbers": True}
    figure = canvas.heatmap(table, [""] * 10, [""] * 20, "", "", **options)
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


def test_a_single_validation_can_be_seen(tmp_path, monkeypatch):
    lines = [{"event": "stepped", "step": step, "loss": 3 - step / 10} for step in range(1, 6)]
    lines.append({"event": "validated", "step": 5, "metrics": {"loss": 2.4}})
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *more, **how: drawn.append(figure))
    draw(tmp_path)
    training, validation = drawn[-1].axes[0].lines
    assert validation.get_marker() == "o" and list(validation.get_xdata()) == [5]
    assert training.get_marker() == ""


@pytest.mark.parametrize(("length", "panels"), [(20, [20]), (21, [11, 10]), (31, [16, 15]), (32, [16, 16])])
def test_a_lens_has_panels_of_about_equal_length(length, panels):
    figure = draw_lens(ch.lens(build(), some_ids(1, length)[0].tolist()))
    shown = [axes.images[0].get_array().shape[1] for axes in figure.axes if axes.images and axes.texts]
    assert shown == panels


def test_ticks_of_a_logarithmic_axis_are_numbers():
    for values, unit, wanted in (
        ([400, 830], "", "500"),
        ([0.001, 0.0016], "s", "1 ms"),
        ([30000, 1e6], "B", "100 kB"),
    ):
        figure, axes = canvas.single(4, 3, "", "")
        axes.plot([1, 2], values)
        axes.set_yscale("log")
        canvas.number_ticks(axes, "y", unit)
        figure.canvas.draw()
        shown = [tick.get_text() for tick in axes.get_yticklabels()]
        assert wanted in shown and not any("10^" in text for text in shown)
