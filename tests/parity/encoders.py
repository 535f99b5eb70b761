"""The harness's encoder part: any class of an encoder, held against the reference that saved it.

Checked: what the head says and every layer's hidden states (padding on either side, segments where there are
some), loss and the gradient of every tensor, the way back to the reference, and clearhead to clearhead.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import clearhead as ch
from clearhead.hub.architecture import is_among
from clearhead.hub.checkpoint import export_state
from tests.parity.harness import GRADIENTS, HIDDEN, LOGITS, batch, check_saved, close, positions_of

# Models that count positions by themselves, from the padding id.
FINDS_POSITIONS = ("roberta", "longformer", "xlm-roberta", "camembert", "mpnet")


def said(output: Any) -> Tensor:
    """What a reference model says, as one tensor in the shape of our head's answer."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    if "logits" in output:  # of ELECTRA's discriminator, one number for each token
        whole = output.logits.ndim > 2 or type(output).__name__ != "ElectraForPreTrainingOutput"
        return output.logits if whole else output.logits[..., None]
    return output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output


def text_inputs(model: Any, side: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a padded batch as the reference takes it and as we do; only padding holds the padding id."""
    config = model.config
    ids, mask = batch(config, side=side)
    ids[~mask] = config.pad_token_id
    if config.model_type == "longformer" and "QuestionAnswering" in type(model).__name__:
        ids = with_separators(ids, mask, config.sep_token_id)
    theirs = {"input_ids": ids, "attention_mask": mask.long()}
    ours = {"ids": ids, "mask": mask}
    if config.model_type not in FINDS_POSITIONS:
        theirs["position_ids"] = positions_of(mask)
    if getattr(config, "type_vocab_size", 0):
        types = (ids + positions_of(mask)) % config.type_vocab_size
        theirs["token_type_ids"], ours["types"] = types, types
    if config.model_type == "longformer" and "For" not in type(model).__name__.removesuffix("MaskedLM"):
        ours["global_mask"] = ids % 5 == 0  # another number in each row, padding perhaps among them
        theirs["global_attention_mask"] = ours["global_mask"].long()
    if config.model_type == "longformer" and "Sequence" in type(model).__name__ and side == "left":
        # The reference makes its first slot global, which is padding here: name the first token.
        theirs["global_attention_mask"] = ((positions_of(mask) == 0) & mask).long()
    return theirs, ours


def with_separators(ids: Tensor, mask: Tensor, separator: int) -> Tensor:
    """Return the ids with three separators in each row: a question, two between, and one at the end."""
    ids = torch.where(ids == separator, separator + 1, ids)
    for row, real in zip(ids, mask):
        slots = real.nonzero()[:, 0]
        row[slots[[len(slots) // 3, len(slots) // 3 + 1, -1]]] = separator
    return ids


def check_text_encoder(
    model: Any, folder: Path, tmp: Path, spared: tuple[str, ...] = (), alike: bool = False, **build: Any
) -> ch.Model:
    """Everything about one class of a text encoder."""
    ours = ch.load(folder)
    for side in ("right", "left"):
        theirs_in, ours_in = text_inputs(model, side)
        check_forward(model, ours, theirs_in, ours_in, side)
    theirs_in, ours_in = text_inputs(model, "right")
    check_backward(model, ours, theirs_in, ours_in, tmp)
    check_back(model, ours, tmp, theirs_in, ours_in, alike=alike, spared=spared, **build)
    return ours


def check_forward(
    model: Any, ours: ch.Model, theirs_in: dict[str, Tensor], ours_in: dict[str, Tensor], side: str
) -> None:
    """Hidden states of every layer and what the head says, wherever there is a real token."""
    with torch.no_grad():
        theirs = model(**theirs_in, output_hidden_states=True)
        with ch.record(ours.model, "blocks.*.resid_pre", "blocks.*.resid_post", "hidden") as seen:
            out = ours.model(**ours_in)
        answer = said(theirs)
        # The reference reads its first slot, which is padding here: give it each row alone.
        if side == "left" and answer.ndim == 2:
            answer = torch.cat([said(model(**alone(theirs_in, row))) for row in range(len(answer))])
    mask = ours_in.get("mask", torch.ones(out.hidden.shape[:2], dtype=torch.bool))
    real = mask if answer.ndim == 3 else slice(None)
    assert out.logits.shape == answer.shape
    close(f"logits, padded {side}", out.logits[real], answer[real], LOGITS)
    last = ours.config.n_layers - 1
    normed = model.config.model_type == "modernbert"  # which shows the last states behind the final norm
    end = "hidden" if normed else f"blocks.{last}.resid_post"
    layers = [*(seen[f"blocks.{i}.resid_pre"] for i in range(last + 1)), seen[end]]
    for depth, (a, b) in enumerate(zip(layers, theirs.hidden_states, strict=True)):
        close(f"hidden state {depth}, padded {side}", a[mask], b[mask], HIDDEN)
    if "last_hidden_state" in theirs:
        close(f"hidden, padded {side}", seen["hidden"][mask], theirs.last_hidden_state[mask], HIDDEN)


def alone(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row without its padding."""
    real = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, real] for name, value in inputs.items()}


def check_backward(
    model: Any, ours: ch.Model, theirs_in: dict[str, Tensor], ours_in: dict[str, Tensor], tmp: Path
) -> None:
    """The same loss on both sides, and the gradient of every tensor of the checkpoint.

    The reference's gradients are saved as if they were weights: so they come under the names its files have.
    """
    answers = [said(model(**theirs_in)), ours.model(**ours_in).logits]  # B C, or B T C
    mask = ours_in.get("mask")
    real = mask if mask is not None and answers[0].ndim == 3 else slice(None)
    targets = torch.arange(answers[0][real].shape[:-1].numel()) % answers[0].shape[-1]
    losses = [F.cross_entropy(answer[real].flatten(0, -2), targets) for answer in answers]
    close("loss", losses[1], losses[0], GRADIENTS)
    model.zero_grad()
    ours.model.zero_grad()
    for loss in losses:
        loss.backward()
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for mine, original in zip(gradients.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(original) if original.grad is None else original.grad)
    gradients.save_pretrained(tmp / "gradients")
    wanted = load_file(tmp / "gradients" / "model.safetensors")
    assert ours.description is not None
    architecture, parameters = ours.description.architecture, dict(ours.model.named_parameters())
    for name, match in export_state(ours.model, architecture).items():
        if getattr(model.config, "tie_word_embeddings", False) and name.endswith("decoder.bias"):
            continue  # another name of the bias beside it
        mine = [
            torch.zeros_like(parameters[part]) if parameters[part].grad is None else parameters[part].grad
            for part in match.ours
        ]
        given = wanted.pop(name) if name in wanted else wanted.pop(name.removeprefix(architecture.prefix))
        # Untied, the reference has that bias and never uses it.
        if not name.endswith(("predictions.bias", "lm_head.bias")) or given.any():
            close(f"gradient of {name}", match.operation.save(mine, ours.config)[0], given, GRADIENTS)
    learned = {name for name in wanted if not is_among(name, architecture.carried)}
    assert not learned, f"without a gradient here: {sorted(learned)}"


def check_back(
    model: Any,
    ours: ch.Model,
    tmp: Path,
    theirs_in: dict[str, Tensor],
    ours_in: dict[str, Tensor],
    **how: Any,
) -> None:
    """Check what is saved, by the answers to one batch."""
    check_saved(
        model, ours, tmp, lambda one: said(one(**theirs_in)), lambda one: one(**ours_in).logits, **how
    )
