"""Rows about two towers: the image tower's own, beside the text tower's, and both against transformers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from clearhead.errors import MissingExtraError
from clearhead.hub.towers import JoinedTowers
from clearhead.inside.checks.rows import Comparison
from clearhead.run.api import Model, load
from clearhead.variants.towers import pair_loss

PARITY = 1e-5
PAIRS, END = 3, 2  # random pairs of a text and an image; tokens after the end of the first text


def named(tower: str, rows: Iterable[Comparison]) -> list[Comparison]:
    """Return rows whose names say which tower they are about."""
    return [dataclasses.replace(row, name=f"{tower}: {row.name}") for row in rows]


def reference_towers(m: Model) -> list[Comparison]:
    """Return the rows that compare both towers with transformers, for a model loaded from its directory."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("a comparison with transformers needs it: pip install transformers") from None
    assert m.towers is not None and m.folder is not None
    folder, kind = m.folder, getattr(transformers, m.towers.description.table.named)
    transformers.logging.set_verbosity_error()

    @functools.cache
    def found() -> dict[str, tuple[Tensor, Tensor]]:
        """Return what both say of the same pairs, in float32, by name."""
        theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ours = load(folder, dtype=torch.float32).towers
        assert ours is not None
        ids, pixels = random_pairs(ours)
        said = theirs(input_ids=ids, pixel_values=pixels, return_loss=True)
        made = ours(ids, pixels)
        return {
            "texts": (made.texts, said.text_embeds),
            "images": (made.images, said.image_embeds),
            "similarities": (made.logits, said.logits_per_image),
            "loss": (pair_loss(made.logits, ours.config.loss), said.loss),
        }

    def difference(name: str) -> Callable[[], float]:
        def run() -> float:
            ours, theirs = found()[name]
            return float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))

        return run

    largest = "largest difference, relative to the largest value above 1, of"
    return [
        Comparison(f"{name} = transformers", f"{largest} {name}", difference(name), PARITY)
        for name in ("texts", "images", "similarities", "loss")
    ]


def random_pairs(towers: JoinedTowers) -> tuple[Tensor, Tensor]:
    """Return random ids [N, T], whose ends differ where an end counts, and pixels [N, C, height, width]."""
    config, generator = towers.config, torch.Generator().manual_seed(0)
    length, end = config.text.max_positions, config.end_id
    ids = torch.randint(config.text.vocab_size, (PAIRS, length), generator=generator)
    if end is not None and end >= 0:
        ids = ids.masked_fill(ids == end, 0 if end else 1)
        for row in range(PAIRS):
            ids[row, max(length - 1 - END * row, 0) :] = end
    height, width = config.frame or (0, 0)
    return ids, torch.randn(PAIRS, config.image.n_channels, height, width, generator=generator)
