"""Share what the tests need: micro models, inputs, ways to run a model, and checks every part must pass."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

import clearhead as ch
from clearhead.app.cli import main

V = 13  # vocabulary of the micro models
T = 8  # tokens of their inputs
# What an encoder of pictures has in place of a vocabulary.
PATCHES = {"input": "patches", "image_size": (8, 8), "patch_size": 4, "class_token": True, "vocab_size": 0}
SMALL = {"vocab_size": V, "d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "max_positions": 32}

# Latent attention with latents of keys alone and of queries too, and what routes tokens beside it.
LATENT = {"positions": "rope", "rope_fraction": 0.5, "attention": ("latent(6)", "latent(5, query_rank=7)")}
GROUPED_EXPERTS = {
    **{"n_experts": 6, "n_active_experts": 3, "router_order": "sigmoid_topk", "router_correction": True},
    **{"router_groups": 3, "n_active_groups": 2, "router_scale": 2.5, "d_expert": 9, "d_shared_expert": 10},
    **{"shared_expert_gate": False, "gated": True},
}


def config(**changes) -> ch.ModelConfig:
    """A micro model; `changes` override."""
    return ch.ModelConfig(**{**SMALL, **changes})


def word_tokenizer(words: list[str], unknown: str) -> Tokenizer:
    """A token for each of some words, which spaces part."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def byte_tokenizer(special: tuple[str, ...] = ("<|end|>",)) -> Tokenizer:
    """A token for each byte, and special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def scramble(module: nn.Module, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """Large random weights, biases and norms too: fresh ones are too tame for a wrong mask to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else spread * noise)
    return module


def build(seed: int = 0, **changes) -> ch.Transformer:
    """A scrambled micro model in evaluation mode."""
    return scramble(ch.Transformer(config(**changes)), seed).eval()


def some_ids(batch: int = 2, length: int = T, seed: int = 1, vocab: int = V) -> Tensor:
    """[B, T] token ids."""
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def worst(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; infinite if anything is NaN."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    a, b = (one.int() if one.dtype == torch.bool else one for one in (a, b))
    difference = (a.detach() - b.detach()).abs().max().item() if a.numel() else 0.0
    return difference if difference == difference else float("inf")


def in_pieces(model: ch.Transformer, ids: Tensor, sizes: list[int], cache: ch.Cache, **given) -> Tensor:
    """Return logits of `ids` fed through `cache` in pieces; cut tensors [B, T] among `given` alongside."""
    along = {
        name: given.pop(name)
        for name in ("mask", "positions", "documents", "types", "axes")
        if given.get(name) is not None
    }
    said, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        cut = {name: x[:, piece] for name, x in along.items()}
        said.append(model(ids[:, piece], cache=cache, **cut, **given).logits)
        start += size
        (
            given.pop("source", None),
            given.pop("source_mask", None),
            given.pop("source_documents", None),
            given.pop("prefix", None),
        )
    assert start == ids.shape[1], "the pieces do not add up"
    return torch.cat(said, dim=1)


def chunks(length: int, size: int) -> list[int]:
    """Pieces of one size, the last perhaps shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


def pad(ids: Tensor, where: str, seed: int = 9) -> tuple[Tensor, Tensor]:
    """Add three slots of random ids to `ids`, left, right or between; return also the mask of real ones."""
    batch, length = ids.shape
    slots = {
        "left": range(3, 3 + length),
        "right": range(length),
        "gaps": [slot for slot in range(length + 3) if slot not in (1, 2, length - 1)],
    }[where]
    padded = some_ids(batch, length + 3, seed, int(ids.max()) + 1)
    mask = torch.zeros(batch, length + 3, dtype=torch.bool)
    padded[:, list(slots)], mask[:, list(slots)] = ids, True
    return padded, mask


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Gradient of every parameter, by name."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found))


def through_bytes(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """`fresh` with the weights of `model`, sent through the bytes of a safetensors file."""
    written = safetensors.torch.save(
        {name: x.detach().clone().contiguous() for name, x in model.state_dict().items()}
    )
    fresh.load_state_dict(safetensors.torch.load(written))
    return fresh.eval()


def differing(
    model: ch.Transformer, ids: Tensor, cached: bool = True, tolerance: float = 1e-5, **given
) -> dict[str, float]:
    """Return what is not the same however a model is run: cached, padded, eager, saved; and by how much."""
    differences, decodes = {}, cached and model.config.decoder is not None
    with torch.no_grad():
        logits = model(ids, **given).logits
        fixed = ch.FixedCache(model.config, *ids.shape[:2]) if decodes else None
        for cache in (ch.Cache(), ch.WindowCache(), fixed) if decodes else ():
            said = in_pieces(model, ids, chunks(ids.shape[1], 3), cache, **given)
            differences[type(cache).__name__] = worst(said, logits)
        for where in ("left", "right", "gaps"):
            padded, mask = pad(ids, where)
            said = model(padded, mask=mask, **given).logits
            said = said[mask].view_as(logits) if logits.ndim == 3 else said  # else one answer for each row
            differences[f"padded {where}"] = worst(said, logits)
        with ch.attending(model, "eager"):
            differences["eager"] = worst(model(ids, **given).logits, logits)
        again = through_bytes(model, ch.Transformer(model.config))
        differences["saved"] = 0.0 if torch.equal(again(ids, **given).logits, logits) else float("inf")
    return {name: gap for name, gap in differences.items() if not gap <= tolerance}


def every_dtype_kept(part: Callable[[Tensor], Tensor], module: nn.Module | None, x: Tensor) -> None:
    """bfloat16 in, bfloat16 out; float64 stays float64."""
    for dtype in (torch.float64, torch.bfloat16):
        if module is not None:
            module.to(dtype)
        assert part(x.to(dtype)).dtype == dtype


class Ran(NamedTuple):
    """What a command left: its exit code, and what it wrote to stdout and to stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON of stdout: one value, or a list of them where it has several lines."""
        lines = [json.loads(line) for line in self.out.splitlines()]
        return lines[0] if len(lines) == 1 else lines


class CommandLine:
    """The command line in this process; an argument that begins with "--" is split at its spaces."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        split = [text.split() if text.startswith("--") else [text] for text in map(str, arguments)]
        self.capsys.readouterr()
        try:
            main([part for some in split for part in some])
            code = 0
        except SystemExit as stop:
            code = stop.code
        return Ran(code, *self.capsys.readouterr())

    def refuses(self, says: str, *arguments: object) -> None:
        """A mistake is one line on stderr, which says what is wrong, and exit code 2."""
        code, out, err = self(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err, (arguments, code, out, err)


def split(*texts: str) -> list[str]:
    """The words of some texts: settings of a recipe, several to a text."""
    return [setting for text in texts for setting in text.split()]


class Notes(list[str]):
    """The lines that a run says of itself: pass it as `on_event`."""

    def __call__(self, event: object) -> None:
        self.append(getattr(event, "line", ""))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled: of the workers of a run the first fills it, and others wait."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = (factory.getbasetemp() if alone else factory.getbasetemp().parent) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".done").exists():
            make(folder)
            (folder / ".done").touch()
    return folder
