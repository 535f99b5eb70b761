"""Check models with an encoder and a decoder: as `harness`, with a source that is padded on either side.

BART and Marian count positions over padding too, so that a row padded on the left is another row to them.
There, a row padded on the left must be what the reference makes of the row alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import clearhead as ch
from clearhead.run.generate.decode import greedy
from tests.parity.harness import GRADIENTS, HIDDEN, LOGITS, check_saved, close, compare_gradients

START, TOKENS = 3, 30  # what decoding begins with, and how long it goes on


def reference(kind: str, config: transformers.PretrainedConfig, folder: Path, seed: int = 0) -> Any:
    """A random model of this class, with norms, biases and rows of padding random too, saved to `folder`."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    # Change fresh weights: they are so small that attention is nearly uniform, or T5's tables so large that
    # each token repeats itself.
    t5 = "t5" in config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.requires_grad:  # all but tables of sines
                parameter.mul_((0.2 if "shared" in name else 1.2) if t5 else 12.0)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
        for part in model.modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx].normal_(std=float(part.weight.std()))
    model.save_pretrained(folder)
    return model


def pair(
    config: transformers.PretrainedConfig, side: str, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source, its mask, target, its mask: rows of several lengths past 32, the target padded right."""
    generator = torch.Generator().manual_seed(seed)
    padding = config.pad_token_id or 0
    real = [token for token in range(config.vocab_size) if token != padding]
    written = [
        token
        for token in range(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
        if token != padding
    ]
    source = torch.tensor(real)[torch.randint(len(real), (3, 47), generator=generator)]
    target = torch.tensor(written)[torch.randint(len(written), (3, 41), generator=generator)]
    source_mask, mask = torch.ones_like(source).bool(), torch.ones_like(target).bool()
    for row in (1, 2):
        source_mask[row, slice(0, 9 * row) if side == "left" else slice(47 - 9 * row, 47)] = False
        mask[row, 41 - 6 * row :] = False
    return source.masked_fill(~source_mask, padding), source_mask, target.masked_fill(~mask, padding), mask


def counts_padding(model: Any) -> bool:
    """Does the reference give padding a position?"""
    return model.config.model_type in ("bart", "mbart", "marian")


def run(model: Any, source: Tensor, source_mask: Tensor, target: Tensor, mask: Tensor, **options: Any) -> Any:
    return model(
        source,
        attention_mask=source_mask.long(),
        decoder_input_ids=target,
        decoder_attention_mask=mask.long(),
        **options,
    )


def layers(output: Any) -> list[Tensor]:
    """Every hidden state of the encoder, then of the decoder."""
    return [*output.encoder_hidden_states, *output.decoder_hidden_states]


def expected(
    model: Any, source: Tensor, source_mask: Tensor, target: Tensor, mask: Tensor, side: str
) -> tuple[list[Tensor], Tensor]:
    """Return what the reference says at the real tokens, row after row: hidden states, then logits.

    For a model without logits, return its hidden states.
    """
    if side == "right" or not counts_padding(model):
        out = run(model, source, source_mask, target, mask, output_hidden_states=True)
        masks = [source_mask] * len(out.encoder_hidden_states) + [mask] * len(out.decoder_hidden_states)
        said = getattr(out, "logits", out.last_hidden_state if "last_hidden_state" in out else None)
        return [state[real] for state, real in zip(layers(out), masks, strict=True)], said[mask]
    rows = [
        run(model, s[m][None], m[m][None], t[n][None], n[n][None], output_hidden_states=True)
        for s, m, t, n in zip(source, source_mask, target, mask)
    ]
    states = [torch.cat([state[0] for state in states]) for states in zip(*map(layers, rows), strict=True)]
    said = [row.logits if "logits" in row else row.last_hidden_state for row in rows]
    return states, torch.cat([row[0] for row in said])


def check_outputs(model: Any, ours: ch.Model, side: str) -> tuple[float, float]:
    """Logits and the hidden states of both stacks; the largest differences of each."""
    source, source_mask, target, mask = pair(model.config, side)
    with (
        torch.no_grad(),
        ch.record(
            ours.model, "encoder.blocks.*.resid_pre", "encoder.hidden", "blocks.*.resid_pre", "hidden"
        ) as seen,
    ):
        out = ours.model(target, mask, source, source_mask)
        states, said = expected(model, source, source_mask, target, mask, side)
    off = float((out.logits[mask] - said).abs().max())
    assert off <= LOGITS, f"logits, source padded {side}: largest difference {off:.2e}, allowed {LOGITS}"
    assert ours.config.n_encoder_layers is not None
    names = [
        *(f"encoder.blocks.{i}.resid_pre" for i in range(ours.config.n_encoder_layers)),
        "encoder.hidden",
    ]
    mine = [seen[name][source_mask] for name in names]
    names += [*(f"blocks.{i}.resid_pre" for i in range(ours.config.n_layers)), "hidden"]
    mine += [seen[name][mask] for name in names[len(mine) :]]
    worst = 0.0
    for name, a, b in zip(names, mine, states, strict=True):
        close(f"{name}, source padded {side}", a, b, HIDDEN)
        worst = max(worst, float((a - b).abs().max()))
    return off, worst


def continued(
    model: Any, source: Tensor, source_mask: Tensor, ours: ch.Model, **options: Any
) -> list[list[int]]:
    """What the reference writes, from the start token on."""
    said = model.generate(
        source,
        attention_mask=source_mask.long(),
        decoder_start_token_id=START,
        max_new_tokens=TOKENS,
        num_beams=1,
        do_sample=False,
        eos_token_id=None,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
        pad_token_id=model.config.pad_token_id,
        use_cache=ours.config.n_layers
        <= (ours.config.n_encoder_layers or 0),  # T5's own has a layer per layer of its encoder
        **options,
    )
    return said[:, 1:].tolist()  # type: ignore[no-any-return]


def check_greedy(model: Any, ours: ch.Model) -> None:
    """Thirty tokens for a batch of padded sources."""
    source, source_mask, _, _ = pair(model.config, "right")
    start = torch.full((len(source), 1), START)
    assert greedy(ours.model, start, TOKENS, source=source, source_mask=source_mask).tolist() == continued(
        model, source, source_mask, ours
    )


@torch.inference_mode()
def check_without_repeats(model: Any, ours: ch.Model, side: str) -> None:
    """Check the same with no token twice and no padding.

    A random model soon repeats one word for ever, which would prove little.
    """
    source, source_mask, _, _ = pair(model.config, side)

    def fresh(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.scatter(1, ids, -torch.inf)
        if model.config.pad_token_id < scores.shape[1]:
            scores[:, model.config.pad_token_id] = -torch.inf
        return scores

    cache, written = ch.Cache(), torch.full((len(source), 1), START)
    for _ in range(TOKENS):
        logits = ours.model(written[:, -1:], source=source, source_mask=source_mask, cache=cache).logits[
            :, -1
        ]
        written = torch.cat([written, fresh(written, logits).argmax(-1, keepdim=True)], dim=1)
    assert written[:, 1:].tolist() == continued(model, source, source_mask, ours, logits_processor=[fresh])


def check_loss(model: Any, ours: ch.Model) -> None:
    """The reference's own loss, and the gradient of every tensor."""
    source, source_mask, target, mask = pair(model.config, "right")
    labels = target.roll(-1, 1)
    theirs = run(model, source, source_mask, target, mask, labels=labels.masked_fill(~mask, -100))
    mine = ours.model(target, mask, source, source_mask).logits
    close("loss", F.cross_entropy(mine[mask], labels[mask]), theirs.loss, GRADIENTS)
    compare_gradients(model, ours, theirs.logits[mask], mine[mask], labels[mask])


def check_back(model: Any, ours: ch.Model, tmp: Path) -> None:
    """Check what is saved, by the answers at the real tokens of one batch."""
    source, source_mask, target, mask = inputs = pair(model.config, "right")

    def said(opened: Any) -> Tensor:
        out = run(opened, *inputs)
        return (out.logits if "logits" in out else out.last_hidden_state)[mask]

    check_saved(model, ours, tmp, said, lambda one: one(target, mask, source, source_mask).logits, alike=True)


def check_encoder_decoder(model: Any, folder: Path, tmp: Path) -> ch.Model:
    """Everything about an encoder-decoder with a language head."""
    ours = ch.load(folder)
    for side in ("right", "left"):
        check_outputs(model, ours, side)
    check_greedy(model, ours)
    check_without_repeats(model, ours, "right" if counts_padding(model) else "left")
    check_loss(model, ours)
    check_back(model, ours, tmp)
    return ours
