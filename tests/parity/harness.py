"""Check any architecture: a random reference model, saved by transformers, must be the same model here.

Checked: logits (padding on either side), every layer's hidden states, greedy continuation, loss and
gradients, the way back (transformers opens what clearhead saved, with nothing missing or unexpected), and
clearhead to clearhead.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.hub.checkpoint import rules_of
from clearhead.hub.files import read_json
from clearhead.hub.rules import matches
from clearhead.run.generate.decode import greedy

transformers.logging.set_verbosity_error()

LOGITS, HIDDEN, GRADIENTS = 2e-5, 1e-4, 1e-4


def config_of(kind: str, options: dict[str, Any]) -> transformers.PretrainedConfig:
    """The reference's config of this kind: of a copy, as it writes into the tables that it is given."""
    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return getattr(transformers, name)(**copy.deepcopy(options))


def reference(kind: str, config: transformers.PretrainedConfig, folder: Path, seed: int = 0) -> Any:
    """A random model of this class, with norms and biases random too, saved to `folder`."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # fresh norms and biases are all ones and zeros, and would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "norm" not in name:
                parameter.mul_(3.0)  # and fresh weights are so small that attention is nearly uniform
    model.save_pretrained(folder)
    return model


def batch(
    config: transformers.PretrainedConfig, rows: int = 3, length: int = 40, side: str = "right", seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Random ids and a padding mask: rows of different lengths, padding on one side."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocab_size, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    for row in range(1, rows):
        gap = slice(0, 7 * row) if side == "left" else slice(length - 7 * row, length)
        mask[row, gap] = False
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """Positions counted over real tokens, as clearhead counts them."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def close(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    scale = max(1.0, float(theirs.detach().abs().max()))
    difference = float((ours - theirs).detach().abs().max())
    assert difference <= tolerance * scale, (
        f"{name}: largest difference {difference:.2e}, allowed {tolerance * scale:.2e}"
    )


def check_decoder(model: Any, folder: Path, tmp: Path, tokens: int = 30, **generate: Any) -> ch.Model:
    """Everything about a decoder with a language head; `generate` are options of the reference's."""
    ours = ch.load(folder)
    config = model.config
    for side in ("right", "left"):
        ids, mask = batch(config, side=side)
        with torch.no_grad():
            theirs = model(
                ids, attention_mask=mask.long(), position_ids=positions_of(mask), output_hidden_states=True
            )
            with ch.record(ours.model, "blocks.*.resid_pre", "hidden") as seen:
                out = ours.model(ids, mask)
        close(f"logits, padded {side}", out.logits[mask], theirs.logits[mask], LOGITS)
        layers = [*(seen[f"blocks.{i}.resid_pre"] for i in range(ours.config.n_layers)), seen["hidden"]]
        if layers[-1].shape != theirs.hidden_states[-1].shape:  # theirs is what the output layer reads
            layers[-1] = ours.model.head.transform(layers[-1])
        for depth, (a, b) in enumerate(zip(layers, theirs.hidden_states, strict=True)):
            close(f"hidden state {depth}, padded {side}", a[mask], b[mask], HIDDEN)
    ids = ids[:1, :9]
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **generate,
    )
    assert greedy(ours.model, ids, tokens).tolist() == theirs[:, 9:].tolist()
    check_gradients(model, ours, ids, ids)
    check_round_trip(model, ours, tmp, lambda other: other(ids).logits, lambda mine: mine(ids).logits)
    return ours


def check_gradients(model: Any, ours: ch.Model, ids: Tensor, targets: Tensor, **inputs: Any) -> None:
    """Loss of the next token, and the gradient of every tensor of the checkpoint."""
    theirs_logits = model(ids).logits
    ours_logits = ours.model(ids).logits
    compare_gradients(model, ours, theirs_logits, ours_logits, targets)


def compare_gradients(
    model: Any, ours: ch.Model, theirs_logits: Tensor, ours_logits: Tensor, targets: Tensor
) -> None:
    """The same loss on both sides, pushed back to the checkpoint's tensors."""
    losses = [
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()) for logits in (theirs_logits, ours_logits)
    ]
    close("loss", losses[1], losses[0], GRADIENTS)
    model.zero_grad()
    ours.model.zero_grad()
    for loss in losses:
        loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.description is not None
    compared = set()
    names = dict(ours.model.named_parameters(remove_duplicate=False))
    for match in matches(rules_of(ours.description.architecture, ours.model), names):
        gradients = [names[part].grad for part in match.ours]
        if any(gradient is None for gradient in gradients) or match.theirs not in wanted:
            continue
        close(
            f"gradient of {match.theirs}",
            match.operation.save(gradients, ours.config)[0],
            wanted[match.theirs],
            GRADIENTS,
        )
        compared.add(match.theirs)
    assert compared == set(wanted), f"no gradient to compare with that of {sorted(set(wanted) - compared)}"


def check_round_trip(model: Any, ours: ch.Model, tmp: Path, theirs_out: Any, ours_out: Any) -> None:
    """Save here, open there with nothing missing or unexpected and the same logits; open here bit for bit."""
    ours.save(tmp / "saved")
    again, info = type(model).from_pretrained(
        tmp / "saved", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    with torch.no_grad():
        close("reference reads it back", theirs_out(again.eval()), theirs_out(model), 1e-6)
        assert torch.equal(ours_out(ch.load(tmp / "saved").model), ours_out(ours.model))
    # Without its config.json, the config alone must lead to an architecture that computes the same.
    fresh = ch.Model(ours.model)
    fresh.save(tmp / "fresh")
    kind = getattr(transformers, read_json(tmp / "fresh" / "config.json")["architectures"][0])
    again, info = kind.from_pretrained(tmp / "fresh", output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["unexpected_keys"], info["unexpected_keys"]
    with torch.no_grad():
        close("reference reads the fresh config", theirs_out(again.eval()), theirs_out(model), 1e-6)
