"""The scales of the style sheet: text reads on what lies under it, and no size stands outside the scale."""

import re

import pytest

from clearhead.app.explorer.record import page_files

STYLE = page_files()["style.css"][0]
SURFACES = ("paper", "card", "accent-soft")
TEXTS = ("ink", "soft", "accent-text", "cross", "wrong", "good")
# Text and what lies under it: all kinds of text on all surfaces, and the pressed states.
PAIRS = [(text, surface) for text in TEXTS for surface in SURFACES] + [
    ("accent-ink", "accent"),
    ("card", "wrong"),  # a part that is off
    ("paper", "ink"),  # a tip
    ("accent", "card"),
]


def palette(theme):
    """The colours of one theme by name."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", STYLE)
    assert len(pairs) >= 12
    return {name: (light, dark)[theme == "dark"] for name, light, dark in pairs}


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    """The ratio of WCAG 2.2."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_a_contrast_of_4_5(theme):
    """The formula gives the ratios that WCAG states for black on white and for #777 on white."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    colours = palette(theme)
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in PAIRS}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}


def test_sizes_and_colours_are_steps_of_the_scales():
    """Below the scales no rule names a colour or a size of text of its own."""
    _, rules = STYLE.split(':root[data-theme="light"]', 1)
    sizes = re.findall(r"font(?:-size)?: [^;}]*", rules)
    own = [rule for rule in sizes if re.search(r"\d(?:rem|px|em)", rule) and "clamp" not in rule]
    assert own in ([], ["font-size: 16px"]), own
    allowed = r"\.piece-\w+|\.swatch|mask-image|#000 calc"
    coloured = [line for line in rules.splitlines() if re.search(r"#[0-9a-f]{6}\b", line)]
    assert [line for line in coloured if not re.search(allowed, line)] == []
