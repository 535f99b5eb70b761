"""Rows of the equality suite that compare with transformers, which opens the same directory."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model, load
from clearhead.errors import InputError, MissingExtraError
from clearhead.generate.decode import greedy
from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Comparison
from clearhead.model.transformer import Transformer

REFERENCE_TOLERANCE = 1e-4
NEW_TOKENS = 50


def reference_rows(m: Model | Transformer) -> list[Comparison]:
    """Return the rows about logits, or hidden states where there are none, and about greedy tokens."""
    if not isinstance(m, Model) or m.folder is None:
        raise InputError(
            "a comparison with transformers needs the directory: pass what ch.load gave, not a bare model"
        )
    pair = _Pair(m)
    kind = "hidden state" if m.config.head in ("none", "embedding") else "logit"
    largest, tokens = f"largest difference of a {kind}", f"of {NEW_TOKENS} greedy tokens, how many differ"
    rows = [
        Comparison("clearhead = transformers", largest, pair.difference, REFERENCE_TOLERANCE),
        Comparison(
            "greedy tokens = transformers", tokens, pair.wrong_tokens, 0.0, fits=m.config.head == "lm"
        ),
    ]
    return [row for row in rows if row.fits]


class _Pair:
    """One directory, opened by both, in float32."""

    def __init__(self, m: Model) -> None:
        try:
            import transformers
        except ImportError:
            raise MissingExtraError(
                "a comparison with transformers needs it: pip install transformers"
            ) from None
        assert m.description is not None and m.folder is not None
        names = m.description.theirs.get("architectures") or [None]
        self.kind = getattr(transformers, str(names[0]), None)
        if self.kind is None:
            raise InputError(
                f"transformers has no class {names[0]} to compare with: this model is clearhead's own"
            )
        transformers.logging.set_verbosity_error()
        self.folder = m.folder

    @cached_property
    def theirs(self) -> Any:
        assert self.kind is not None
        return self.kind.from_pretrained(self.folder, attn_implementation="eager", dtype=torch.float32).eval()

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs(load(self.folder, dtype=torch.float32).model.eval(), length=40)

    def difference(self) -> float:
        """Return the largest difference, absolute, as parity is published."""
        inputs = self.inputs
        out = inputs.model(inputs.main, source=inputs.source)
        if inputs.source is not None:
            theirs = self.theirs(input_ids=inputs.source, decoder_input_ids=inputs.main)
        else:
            theirs = self.theirs(**{"pixel_values" if inputs.kind == "patches" else "input_ids": inputs.main})
        if "logits" in theirs:
            return _largest(out.logits, theirs.logits)
        if "start_logits" in theirs:
            return _largest(out.logits, torch.stack([theirs.start_logits, theirs.end_logits], dim=-1))
        return _largest(out.hidden, theirs.last_hidden_state)

    def wrong_tokens(self) -> float:
        """Return how many greedy tokens are not those that transformers writes."""
        inputs, model = self.inputs, self.inputs.model
        room = model.config.max_positions - 4 if model.config.positions == "learned" else NEW_TOKENS
        tokens = max(1, min(NEW_TOKENS, room))
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1}
        options |= {"eos_token_id": None, "pad_token_id": 0}
        if inputs.source is not None:
            source, prompt = inputs.source[:1], inputs.main[:1, :1]
            forced = {"forced_bos_token_id": None, "forced_eos_token_id": None}
            options |= {"input_ids": source, "decoder_input_ids": prompt, **forced}
            options["decoder_start_token_id"] = int(prompt)
        else:
            source, prompt = None, inputs.main[:1, :4]
            options |= {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        theirs = self.theirs.generate(**options)[:, prompt.shape[1] :]
        ours = greedy(model, prompt, tokens, source=source)
        return float((ours[:, : theirs.shape[1]] != theirs).sum())


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())
