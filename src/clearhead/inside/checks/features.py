"""Rows of the equality suite about sparse features: what they compute, and that they can stand in a model.

The dictionary has random weights: what is checked is arithmetic and wiring, not what was learned.
"""

import math

import torch
from torch import Tensor

from clearhead.core.dtypes import precise
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.inside.features.dictionary import Dictionary, find_taps
from clearhead.variants.contexts import edit, record, tap_names

FEATURES, ACTIVE = 24, 4


def feature_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about a skip transcoder of the last feed-forward."""
    parts = [name.removesuffix(".in") for name in tap_names(inputs.model) if name.endswith("feedforward.in")]
    return [
        inputs.compare(
            "replacement + error = model",
            "the last feed-forward replaced by features and their error, with the model",
            _replaced,
            parts[-1:],
            fits=bool(parts),
        ),
        inputs.compare(
            "features = formula",
            "features and reconstruction with float64 sums, one token and one feature at a time",
            _spelled_out,
            parts[-1:],
            tolerance=1e-5,
            fits=bool(parts),
        ),
    ]


def _drawn(inputs: Inputs, parts: list[str]) -> tuple[Dictionary, Tensor]:
    """Return a dictionary of random weights, and what it reads of these inputs: [N, D]."""
    reads, writes = find_taps(inputs.model.config, parts[0], "skip-transcoder")
    with record(inputs.model, *reads) as seen:
        inputs.run()
    x = seen[reads[0]].flatten(0, -2)
    width = x.shape[-1]
    dictionary = Dictionary("skip-transcoder", reads, writes, width, width, FEATURES, k=ACTIVE)
    generator = torch.Generator().manual_seed(0)
    for weight in dictionary.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(width))
    return dictionary.to(inputs.device), x


def _replaced(inputs: Inputs, parts: list[str]) -> float:
    dictionary, _ = _drawn(inputs, parts)
    read: list[Tensor] = []

    def replace(y: Tensor) -> Tensor:
        return (precise(dictionary(read[-1])) + dictionary.error(read[-1], y)).to(y.dtype)

    with edit(inputs.model, {dictionary.at: read.append, dictionary.out: replace}):
        replaced = inputs.run()
    return gap(replaced, inputs.run())


def _spelled_out(inputs: Inputs, parts: list[str]) -> float:
    dictionary, x = _drawn(inputs, parts)
    weights = {name: weight.double().cpu() for name, weight in dictionary.state_dict().items()}
    features, written = [], []
    for token in x.float().double().cpu():
        sums = [
            float((token * weights["W_enc"][:, feature]).sum() + bias)
            for feature, bias in enumerate(weights["b_enc"])
        ]
        best = sorted(range(FEATURES), key=lambda feature: -sums[feature])[:ACTIVE]
        a = [max(value, 0.0) if feature in best else 0.0 for feature, value in enumerate(sums)]
        y = weights["b_dec"] + weights["W_skip"] @ token
        for feature, value in enumerate(a):
            y = y + value * weights["W_dec"][feature]
        features.append(a)
        written.append(y)
    x = x.float()
    return max(
        gap(dictionary.encode(x).double(), torch.tensor(features, dtype=torch.double)),
        gap(dictionary(x).double(), torch.stack(written)),
    )
