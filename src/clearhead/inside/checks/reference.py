"""Rows of the equality suite that compare with transformers, which opens the same directory."""

import functools
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model, load
from clearhead.errors import InputError, MissingExtraError, refuse
from clearhead.generate.decode import greedy
from clearhead.inside.checks.rows import Comparison, Inputs
from clearhead.model.transformer import Transformer

REFERENCE_TOLERANCE = 1e-4
NEW_TOKENS = 50


def reference_rows(m: Model | Transformer) -> list[Comparison]:
    """Return the rows about logits, or hidden states where there are none, and about greedy tokens."""
    if not isinstance(m, Model) or m.folder is None:
        raise InputError(
            "a comparison with transformers needs the directory: pass what ch.load gave, not a bare model"
        )
    their_class, folder = _their_class(m), m.folder
    kind = "hidden state" if m.config.head in ("none", "embedding") else "logit"
    largest, tokens = f"largest difference of a {kind}", f"of {NEW_TOKENS} greedy tokens, how many differ"

    @functools.cache
    def opened() -> tuple[Inputs, Any]:
        """Open the directory in both, in float32."""
        theirs = their_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return Inputs(load(folder, dtype=torch.float32).model.eval(), length=40), theirs.eval()

    rows = [
        Comparison("clearhead = transformers", largest, lambda: _difference(*opened()), REFERENCE_TOLERANCE),
        Comparison(
            *("greedy tokens = transformers", tokens, lambda: _wrong_tokens(*opened()), 0.0),
            fits=m.config.head == "lm",
        ),
    ]
    return [row for row in rows if row.fits]


def _their_class(m: Model) -> Any:
    """Return the class of transformers that a directory names."""
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("a comparison with transformers needs it: pip install transformers") from None
    assert m.description is not None
    names = m.description.theirs.get("architectures") or [None]
    found = getattr(transformers, str(names[0]), None)
    refuse(
        found is None, f"transformers has no class {names[0]} to compare with: this model is clearhead's own"
    )
    transformers.logging.set_verbosity_error()
    return found


def _difference(inputs: Inputs, their_model: Any) -> float:
    """Return the largest difference, absolute, as parity is published."""
    main, source = inputs.main, inputs.given.get("source")
    out = inputs.model(main, source=source)
    if source is not None:
        theirs = their_model(input_ids=source, decoder_input_ids=main)
    else:
        theirs = their_model(**{"pixel_values" if inputs.kind == "patches" else "input_ids": main})
    if "logits" in theirs:
        return _largest(out.logits, theirs.logits)
    if "start_logits" in theirs:
        return _largest(out.logits, torch.stack([theirs.start_logits, theirs.end_logits], dim=-1))
    return _largest(out.hidden, theirs.last_hidden_state)


def _wrong_tokens(inputs: Inputs, their_model: Any) -> float:
    """Return how many greedy tokens are not those that transformers writes."""
    model, source = inputs.model, inputs.given.get("source")
    room = model.config.max_positions - 4 if model.config.positions == "learned" else NEW_TOKENS
    tokens = max(1, min(NEW_TOKENS, room))
    read: dict[str, Any]
    if source is None:
        prompt = inputs.main[:1, :4]
        read = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    else:
        source, prompt = source[:1], inputs.main[:1, :1]
        unforced = {"forced_bos_token_id": None, "forced_eos_token_id": None}
        first = {"decoder_input_ids": prompt, "decoder_start_token_id": int(prompt)}
        read = {"input_ids": source, **first, **unforced}
    plain = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0}
    theirs = their_model.generate(max_new_tokens=tokens, **plain, **read)[:, prompt.shape[1] :]
    ours = greedy(model, prompt, tokens, source=source)
    return float((ours[:, : theirs.shape[1]] != theirs).sum())


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())
