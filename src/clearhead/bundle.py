"""A model with all that belongs to it: tokenizer, labels, generation defaults. What `load` gives and `save` writes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from tokenizers import Tokenizer
from torch import Tensor

from clearhead import tasks
from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, InputError, MissingExtraError, nearest
from clearhead.fast.prepare import prepared
from clearhead.generate.beam import Beams
from clearhead.generate.compiled import Steps
from clearhead.generate.prefix import Prefix
from clearhead.generate.sampling import Sampling
from clearhead.generate.text import Generation, OnText, Score, search
from clearhead.generate.text import generate as generate_text
from clearhead.generate.text import score as score_ids
from clearhead.hub.checkpoint import Description, describe, exported_config, load_model, save_model
from clearhead.hub.files import read_json, whole_folder, write_json
from clearhead.hub.pixels import PREPROCESSOR
from clearhead.hub.sentences import Sentences, read_sentences, write_sentences
from clearhead.hub.tokenizer import (
    encode,
    load_tokenizer,
    open_tokenizer,
    read_settings,
    save_tokenizer,
    special_ids,
    stop_ids,
)
from clearhead.model.attention import Attention
from clearhead.model.heads import pool
from clearhead.model.taps import SILENT, tap_for
from clearhead.model.transformer import Transformer, evaluating

SHARD_SIZE = 5_000_000_000


@dataclass
class Model:
    """A model ready to use."""

    model: Transformer
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # defaults: special token ids, sampling
    description: Description | None = None  # the config.json it came with
    folder: Path | None = None
    special: dict[str, int] = field(
        default_factory=dict
    )  # ids by role: pad, bos, eos, unk, cls, sep, mask, decoder_start, ...
    settings: dict[str, Any] = field(default_factory=dict)  # the tokenizer_config.json it came with
    labels: tuple[str, ...] = ()  # names of the classes, for a head that has them
    sentences: Sentences | None = None  # how sentence-transformers makes one vector of a text
    images: dict[str, Any] = field(default_factory=dict)  # the preprocessor_config.json it came with
    _copy: tuple[object, Transformer] | None = field(default=None, repr=False)
    _steps: Steps | None = field(default=None, repr=False)  # of that copy, compiled
    _prefix: Prefix | None = field(default=None, repr=False)  # what the last call with `reuse` has read

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.model.config

    @property
    def stops(self) -> tuple[int, ...]:
        """Every id that ends a generated text."""
        return stop_ids(
            self.special, self.generation, self.description.theirs if self.description is not None else {}
        )

    @property
    def max_length(self) -> int:
        """The most tokens that a text given to the model may have."""
        limits = (
            self.config.max_positions,
            self.settings.get("model_max_length"),
            self.sentences and self.sentences.max_length,
        )
        return min(limit for limit in limits if type(limit) is int and limit > 0)

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text, special tokens included, cut to `max_length`."""
        return encode(self.text_tokenizer, texts, max_length)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, where text cannot do without one."""
        if self.tokenizer is None:
            raise InputError(
                f"{self.folder or 'this model'} has no tokenizer (looked for tokenizer.json, vocab.txt, vocab.json with merges.txt, "
                "a SentencePiece .model): give token ids in place of text, add tokenizer.json, or name one that lies elsewhere (tokenizer)"
            )
        return self.tokenizer

    classify, tag, fill, answer, translate = (
        tasks.classify,
        tasks.tag,
        tasks.fill,
        tasks.answer,
        tasks.translate,
    )

    @torch.inference_mode()
    def embed(self, texts: str | list[str], batch_size: int = 32) -> Tensor:
        """One vector per text, in the order given: N texts -> [N, D].

        The states of a text's tokens are pooled as the directory says (sentence-transformers' modules.json), else by
        their mean. Texts longer than the model takes are cut. Those of like length share a batch, padded on the right.
        """
        if self.config.family == "encoder-decoder":
            raise InputError(
                "embed needs a model of one stack, and this is an encoder-decoder: choose an encoder or a decoder"
            )
        texts = [texts] if isinstance(texts, str) else texts
        how = self.sentences or Sentences(normalise=self.config.head == "embedding" and self.config.normalise)
        rows = self.encode(list(texts), self.max_length)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        device = next(self.model.parameters()).device
        vectors = torch.empty(len(rows), self.config.d_model)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            ids, mask = _padded([rows[row] for row in chosen], self.special.get("pad", 0))
            with evaluating(self.model):
                hidden = self.model(ids.to(device), mask.to(device), logits="none").hidden  # B T D
            pooled = pool(hidden, mask.to(device), how.pooling).float()  # B D
            vectors[chosen] = (nnf.normalize(pooled, dim=-1) if how.normalise else pooled).cpu()
        return vectors

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 50,
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        logprobs: bool = False,
        alternatives: int = 0,
        on_text: OnText | None = None,
        seconds: float | None = None,
        cancel: Callable[[], bool] | threading.Event | None = None,
        stop_tokens: Sequence[int | str] = (),
        overflow: Literal["refuse", "window"] = "refuse",
        reuse: bool = False,
        lookup: int = 0,
        draft: Model | None = None,
        draft_tokens: int = 4,
        num_beams: int = 1,
        num_return: int = 1,
        compile: bool | None = None,
        **options: Any,
    ) -> Generation | list[Generation] | list[list[Generation]]:
        """Continue a prompt, or, with an encoder, answer it; a list of prompts gives a list.

        With `num_return` above 1, each prompt gives a list, best first.

        Args:
            prompt: text, or ids; or a list of either. In a batch each row comes out as it would alone.
            max_new_tokens: where each row ends at the latest.
            seed: of the draws of each row.
            stop: text that ends a row; it is not part of the result.
            logprobs: report the log-probability of each new token.
            alternatives: report this many of the best tokens at each step.
            on_text: called with the row's number and its new text as soon as that is sure.
            seconds: stop every row after this time.
            cancel: an event, or a function asked after each token; once it is set, or says True, every row ends with what it has.
            stop_tokens: further tokens that end a row, as ids or by name; the token is not part of the result.
            overflow: "window" keeps, of a prompt too long for the context, the last tokens that fit; "refuse" does not.
            reuse: keep what is read for the next call with `reuse`: what its prompt has in common with it is not read again.
            lookup: guess this many tokens at a time from the row's own text. The result is the same, and sooner where text repeats.
            draft: a smaller model with the same vocabulary that guesses in place of that; draws then follow the same distribution.
            draft_tokens: how many tokens it guesses at a time.
            num_beams: search for the best continuation with this many beams; 1 is greedy, or draws where there is a temperature.
            num_return: how many of the best continuations to give.
            compile: run each token's step compiled. The first call of a size takes long, those after it are fast. None: on a GPU,
                where that step is there already or the new tokens are many enough to pay for it.
            options: `Sampling`'s fields: temperature (0, greedy, unless given), top_k, top_p, min_p, penalties, ...;
                and `Beams`' fields: length_penalty, early_stopping, num_beam_groups, diversity_penalty.
        """
        given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor or an array of ids
        single = isinstance(given, str) or (
            len(given) > 0 and not isinstance(given[0], str | Sequence | Tensor)
        )
        prompts = self._fit(
            [self._prompt(one) for one in ([given] if single else given)], overflow, max_new_tokens
        )
        stop_ids = self._stop_ids(stop_tokens)
        if not isinstance(seed, int):
            raise InputError(f"seed {seed!r} must be a whole number")
        sampling, more = _split(options)
        beams = Beams(num_beams=num_beams, num_return=num_return, **more)
        if num_beams > 1:
            asked_for = {"stop": stop, "on_text": on_text, "logprobs": logprobs, "alternatives": alternatives}
            asked_for |= {
                "cancel": cancel is not None,
                "reuse": reuse,
                "lookup": lookup,
                "draft": draft is not None,
            }
            for name, asked in asked_for.items():
                if asked:
                    raise InputError(
                        f"{name} with num_beams {num_beams}: beams are known only at the end, so leave one of them out"
                    )
            with evaluating(self.model):
                found = search(
                    self._runner(),
                    self.tokenizer,
                    prompts,
                    max_new_tokens,
                    Sampling(**sampling),
                    beams,
                    stop_ids=stop_ids,
                    start=self._start(),
                    seconds=seconds,
                )
            best = found if num_return > 1 else [row[0] for row in found]
            return best[0] if single else best
        both = (self.tokenizer, draft.tokenizer) if draft is not None else (None, None)
        if both[0] is not None and both[1] is not None and both[0].get_vocab() != both[1].get_vocab():
            raise InputError(
                "the draft's tokenizer has another vocabulary than the model's: choose a draft that shares it"
            )
        if reuse and (len(prompts) != 1 or self.config.family != "decoder"):
            raise InputError(
                f"reuse with {len(prompts)} prompts of a {self.config.family}: it takes one prompt of a decoder at a time"
            )
        with evaluating(self.model), evaluating(draft.model if draft is not None else self.model):
            runner = self._runner()
            prefix = self._reused(runner) if reuse else None
            made = generate_text(
                runner,
                self.tokenizer,
                prompts,
                max_new_tokens,
                Sampling(**sampling),
                stop_ids=stop_ids,
                stop=[stop] if isinstance(stop, str) else stop,
                seeds=[seed] * len(prompts),
                start=self._start(),
                alternatives=alternatives,
                logprobs=logprobs,
                on_text=on_text,
                seconds=seconds,
                cancel=cancel.is_set if isinstance(cancel, threading.Event) else cancel,
                lookup=lookup,
                draft=draft._runner() if draft is not None else None,
                draft_tokens=draft_tokens,
                prefix=prefix,
                steps=self._compiled(runner, compile),
                compile=compile,
            )
            self._prefix = prefix if reuse else self._prefix
        return made[0] if single else made

    def score(self, text: str | Sequence[int], source: str | Sequence[int] | None = None) -> Score:
        """Log-probability of each token of a text, and its perplexity; given `source`, where there is an encoder."""
        both = self.config.family == "encoder-decoder"
        if both != (source is not None):
            raise InputError(
                "score needs a source for this encoder-decoder"
                if both
                else "score takes a source only with an encoder"
            )
        ids, start = self._prompt(text), self._start()
        if len(start) > 1 and ids[:1] != start[1:]:
            ids = [*start[1:], *ids]  # what every answer begins with is part of it
        with evaluating(self.model):
            return score_ids(self.model, ids, None if source is None else self._prompt(source), start[:1])

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Ids of a prompt; what a tokenizer puts at the end of a whole text does not belong to one that goes on."""
        if not isinstance(prompt, str):
            ids = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
            if not all(isinstance(token, int) for token in ids):
                raise InputError(
                    f"a prompt is {ids[:4]}: it must be text or a list of token ids, whole numbers"
                )
            return ids
        ids = self.encode([prompt])[0]
        if self.config.family == "decoder" and len(ids) > 1 and ids[-1] in self.stops:
            ids = ids[:-1]
        if not ids and "bos" in self.special:
            ids = [self.special["bos"]]
        return ids

    def _fit(self, prompts: list[list[int]], overflow: str, max_new_tokens: int) -> list[list[int]]:
        """The last tokens of each prompt that fit into the context, beside the new ones where they share it."""
        if overflow not in ("refuse", "window"):
            raise InputError(f'overflow "{overflow}" is not known: choose refuse or window')
        room = self.max_length - (max_new_tokens - 1 if self.config.family == "decoder" else 0)
        if overflow == "refuse":
            return prompts
        if room < 1:
            raise InputError(
                f"{max_new_tokens} new tokens leave no room for a prompt: the model reads {self.max_length} at most"
            )
        return [prompt[-room:] for prompt in prompts]

    def _stop_ids(self, tokens: Sequence[int | str]) -> tuple[int, ...]:
        """Every id that ends a row, with those given as ids or names; one that the model does not know is an error."""
        size, ids = self.config.vocab_size, []
        for token in tokens:
            found = self.text_tokenizer.token_to_id(token) if isinstance(token, str) else token
            if type(found) is not int or not 0 <= found < size:
                special = (
                    []
                    if self.tokenizer is None
                    else [str(one) for one in self.tokenizer.get_added_tokens_decoder().values()]
                )
                near = nearest(token, special) if isinstance(token, str) else f": ids go from 0 to {size - 1}"
                raise InputError(
                    f"stop token {token!r} is not in the vocabulary{near}; text that is no token goes into stop"
                )
            ids.append(found)
        return (*(token for token in self.stops if token < size), *ids)

    def _compiled(self, runner: Transformer, asked: bool | None) -> Steps | None:
        """The compiled steps of the model's fast copy, where they are asked for or may pay."""
        on_gpu = next(runner.parameters()).is_cuda
        if runner is self.model or not (on_gpu if asked is None else asked):
            return None
        if self._steps is None or self._steps.model is not runner:
            self._steps = Steps(runner)
        return self._steps

    def _reused(self, runner: Transformer) -> Prefix:
        """What the last call has read, if the model is still the same; taken out, so that no two calls have it at once."""
        prefix, self._prefix = self._prefix, None
        return (
            prefix
            if prefix is not None and prefix.model is runner and runner is not self.model
            else Prefix(runner)
        )

    def _start(self) -> list[int]:
        """What the decoder of an encoder-decoder begins with."""
        if self.config.family != "encoder-decoder":
            return []
        start = next(
            (self.special[role] for role in ("decoder_start", "bos", "pad") if role in self.special), 0
        )
        return [start, self.special["forced_bos"]] if "forced_bos" in self.special else [start]

    def _runner(self) -> Transformer:
        """The model's fast copy; the model itself while somebody watches it, through taps, hooks or a chosen kernel."""
        parts = list(self.model.modules())
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        chosen = any(isinstance(part, Attention) and part.kernel != "fused" for part in parts)
        if hooked or chosen or tap_for(self.model) is not SILENT:
            return self.model
        weights = list(self.model.parameters())
        state = [
            (id(w), w.data_ptr(), w.dtype, w.device, -1 if w.is_inference() else w._version) for w in weights
        ]
        if (
            self._copy is None or self._copy[0] != state
        ):  # made when first needed, and again when the weights have changed
            self._copy = (state, prepared(self.model))
        return self._copy[1]

    def save(
        self, folder: str | Path, dtype: torch.dtype | None = None, shard_size: int = SHARD_SIZE
    ) -> None:
        """Write a Hugging Face directory: whole, or not at all. Other files of an existing directory stay."""
        target = Path(folder)
        architecture, theirs = exported_config(self.config, self.description)
        if len(self.labels) == self.config.n_classes > 0:
            names = {str(index): name for index, name in enumerate(self.labels)}
            theirs |= {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
        original = self.description
        if original is None or original.config != self.config:  # else its config.json says them
            theirs |= self._named_ids(theirs)
        carried = original.carried if original is not None and original.config == self.config else {}
        with whole_folder(target) as work:
            save_model(work, self.model, architecture, theirs, shard_size, dtype, carried)
            if self.tokenizer is not None:
                save_tokenizer(work, self.tokenizer, self.special, self.settings, self.config.max_positions)
            if self.generation:
                write_json(work / "generation_config.json", self.generation)
            if self.images:
                write_json(work / PREPROCESSOR, self.images)
            if self.sentences is not None:
                write_sentences(work, self.sentences, self.config.d_model)

    def _named_ids(self, theirs: dict[str, Any]) -> dict[str, int]:
        """Special token ids as config.json has them; a padding id there already belongs to the table of positions."""
        roles = ["bos", "eos", *(["pad"] if theirs.get("pad_token_id") is None else [])]
        if self.config.family == "encoder-decoder":
            roles.append("decoder_start")
        return {f"{role}_token_id": self.special[role] for role in roles if role in self.special}


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `Sampling` among some options, and those of `Beams`."""
    fields = [{entry.name for entry in dataclasses.fields(kind)} for kind in (Sampling, Beams)]
    known = sorted(fields[0] | fields[1])
    for name in options:
        if name not in known:
            raise InputError(
                f'unknown option "{name}"{nearest(name, known)}: generate takes {", ".join(known)}'
            )
    sampling, beams = ({name: value for name, value in options.items() if name in names} for names in fields)
    return sampling, beams


def _padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] of rows of unequal length, padded on the right; a row without tokens gets one padding token."""
    length = max(1, *map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])  # B T
    mask = torch.tensor(
        [[True] * max(1, len(row)) + [False] * (length - max(1, len(row))) for row in rows]
    )  # B T
    return ids, mask


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    allow_download: bool = False,
    tokenizer: str | Path | None = None,
) -> Model:
    """Open a model directory, clearhead's or Hugging Face's; no network unless `allow_download`.

    `tokenizer` names one that lies elsewhere: a directory, a tokenizer.json, a SentencePiece .model, llama2.c's .bin.
    """
    path = Path(folder)
    if not path.is_dir():
        if not allow_download:
            raise CheckpointError(
                f"{folder} is not a directory: name a model directory; one from the Hub is fetched by "
                f"`hf download {folder} --local-dir DIR`, or in Python by load with allow_download=True"
            )
        path = _download(str(folder))
    description = describe(path)
    model, description = load_model(path, description, dtype)
    defaults = path / "generation_config.json"
    generation = read_json(defaults) if defaults.exists() else {}
    found, settings = (
        open_tokenizer(Path(tokenizer), path)
        if tokenizer is not None
        else (load_tokenizer(path), read_settings(path))
    )
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return Model(
        model,
        found,
        generation,
        description,
        path,
        special=special_ids(found, settings, generation, description.theirs),
        settings=settings,
        labels=_labels(description),
        sentences=read_sentences(path),
        images=read_json(path / PREPROCESSOR) if (path / PREPROCESSOR).exists() else {},
    )


def _labels(description: Description) -> tuple[str, ...]:
    """The names of the classes in the order of their ids; LABEL_0, LABEL_1, ... where config.json does not name each."""
    count, names = description.config.n_classes, description.theirs.get("id2label")
    if isinstance(names, dict) and set(names) == {str(index) for index in range(count)}:
        return tuple(str(names[str(index)]) for index in range(count))
    return tuple(f"LABEL_{index}" for index in range(count))


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("downloading needs huggingface_hub: pip install 'clearhead[hub]'") from None
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.spm", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from None
