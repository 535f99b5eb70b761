"""Check any architecture: a random reference model, saved by transformers, must be the same model here.

Checked: logits (padding on either side), every layer's hidden states, greedy continuation, loss and
gradients, the way back (transformers opens what clearhead saved, with nothing missing or unexpected), and
clearhead to clearhead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import clearhead as ch
from clearhead.hub.architecture import is_among
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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
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


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to values above one."""
    scale = max(1.0, float(theirs.detach().abs().max()))
    return float((ours - theirs).detach().abs().max()) / scale


def close(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    difference = gap(ours, theirs)
    assert difference <= tolerance, f"{name}: largest difference {difference:.2e}, allowed {tolerance:.2e}"


def check_decoder(
    model: Any,
    folder: Path,
    tmp: Path,
    tokens: int = 30,
    sides: tuple[str, ...] = ("right", "left"),
    **generate: Any,
) -> ch.Model:
    """Everything about a decoder with a language head; `generate` are options of the reference's."""
    ours = ch.load(folder)
    config = model.config
    stage = "resid_post" if config.model_type == "mamba2" else "resid_pre"  # of the states that it returns
    for side in sides:
        ids, mask = batch(config, side=side)
        with torch.no_grad():
            theirs = model(
                ids, attention_mask=mask.long(), position_ids=positions_of(mask), output_hidden_states=True
            )
            with ch.record(ours.model, f"blocks.*.{stage}", "hidden") as seen:
                out = ours.model(ids, mask)
        close(f"logits, padded {side}", out.logits[mask], theirs.logits[mask], LOGITS)
        layers = [*(seen[f"blocks.{i}.{stage}"] for i in range(ours.config.n_layers)), seen["hidden"]]
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
    compare_gradients(model, ours, model(ids).logits, ours.model(ids).logits, ids)
    check_saved(model, ours, tmp, lambda one: one(ids).logits, lambda one: one(ids).logits, alike=True)
    return ours


def compare_gradients(
    model: Any, ours: ch.Model, theirs_logits: Tensor, ours_logits: Tensor, targets: Tensor
) -> set[str]:
    """The same loss on both sides, and the gradient of every tensor of the checkpoint."""
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
    return compared


def reopened(kind: Any, folder: Path, spared: tuple[str, ...] = (), **build: Any) -> Any:
    """Open in transformers what clearhead saved: nothing but `spared` is missing, nothing is unexpected."""
    build = {"attn_implementation": "eager", **build}
    model, info = kind.from_pretrained(folder, output_loading_info=True, **build)
    assert not [name for name in info["missing_keys"] if not is_among(name, spared)], info["missing_keys"]
    problems = {name: info[name] for name in ("unexpected_keys", "mismatched_keys")}
    assert not any(problems.values()), problems
    return model.eval()


def read_by_the_reference(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """What it makes of a config.json, except for the ids of special tokens, and the files of weights."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    ignored = ("_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id")
    weights = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    return {name: value for name, value in config.items() if name not in ignored}, weights


def check_saved(
    model: Any,
    ours: ch.Model,
    tmp: Path,
    theirs_out: Callable[[Any], Tensor],
    ours_out: Callable[[ch.Transformer], Tensor],
    alike: bool = False,
    spared: tuple[str, ...] = (),
    **build: Any,
) -> None:
    """Save here, open there with nothing missing or unexpected and the same answer; open here bit for bit.

    Both with the config.json it came with and, fresh, from our config alone; then `spared` may be missing,
    and where others are `alike`, the class may be a better known one with the same config.
    """
    files = []
    with torch.no_grad():
        wanted, mine = theirs_out(model), ours_out(ours.model)
        for name, loaded in (("saved", ours), ("fresh", ch.Model(ours.model))):
            loaded.save(tmp / name)
            fresh, kind = name == "fresh", read_json(tmp / name / "config.json")["architectures"][0]
            files.append(read_by_the_reference(tmp / name))
            if files[0] != files[-1] or not fresh:  # the same files are the same model
                again = reopened(getattr(transformers, kind), tmp / name, spared if fresh else (), **build)
                close(f"reference reads what was {name}", theirs_out(again), wanted, 1e-6)
            back = ch.load(tmp / name)
            assert torch.equal(ours_out(back.model), mine)
            assert back.config == ours.config
            assert kind == type(model).__name__ or (alike and fresh)
            assert back.description is not None and ours.description is not None
            if kind == type(model).__name__:
                assert back.description.architecture is ours.description.architecture
