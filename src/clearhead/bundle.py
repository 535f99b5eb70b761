"""A model with all that belongs to it: tokenizer, special tokens, labels, generation defaults.

`Bundle` is what tasks read and what is saved. `clearhead.api.Model` is a bundle with the tasks as its
methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from clearhead.config import ModelConfig
from clearhead.errors import InputError, refuse
from clearhead.generate.engine import Engine
from clearhead.hub import checkpoint, files
from clearhead.hub.pixels import PREPROCESSOR
from clearhead.hub.sentences import Sentences, write_sentences
from clearhead.hub.tokenizer import encode, save_tokenizer, stop_ids
from clearhead.model.transformer import Transformer

SHARD_SIZE = 5_000_000_000


def default_names(count: int) -> tuple[str, ...]:
    """Return the names of classes that have none: LABEL_0, LABEL_1, ..."""
    return tuple(f"LABEL_{number}" for number in range(count))


@dataclass
class Bundle:
    """A Transformer with its tokenizer and settings, whether it was loaded or built."""

    model: Transformer
    tokenizer: Tokenizer | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # defaults: special token ids, sampling
    description: checkpoint.Description | None = None  # the config.json it came with
    folder: Path | None = None
    special: dict[str, int] = field(default_factory=dict)  # ids by role: pad, bos, eos, cls, sep, mask, ...
    settings: dict[str, Any] = field(default_factory=dict)  # the tokenizer_config.json it came with
    labels: tuple[str, ...] = ()  # names of the classes, for a head that has them
    sentences: Sentences | None = None  # how sentence-transformers makes one vector of a text
    images: dict[str, Any] = field(default_factory=dict)  # the preprocessor_config.json it came with
    _engine: Engine | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def engine(self) -> Engine:
        """What generation keeps from call to call; made when first needed, and never copied or pickled."""
        if self._engine is None or self._engine.model is not self.model:
            self._engine = Engine(self.model)
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; LABEL_0, LABEL_1, ... where they have none."""
        return self.labels or default_names(self.config.n_classes)

    @property
    def stops(self) -> tuple[int, ...]:
        """Every id that ends a generated text."""
        theirs = self.description.theirs if self.description is not None else {}
        return stop_ids(self.special, self.generation, theirs)

    @property
    def start_ids(self) -> list[int]:
        """The ids that the decoder of an encoder-decoder begins with; none for a model of one stack."""
        if self.config.family != "encoder-decoder":
            return []
        roles = ("decoder_start", "bos", "pad")
        start = next((self.special[role] for role in roles if role in self.special), 0)
        return [start, self.special["forced_bos"]] if "forced_bos" in self.special else [start]

    @property
    def max_length(self) -> int:
        """The most tokens that a text given to the model may have."""
        limits = (
            self.config.max_positions,
            self.settings.get("model_max_length"),
            self.sentences and self.sentences.max_length,
        )
        return min(limit for limit in limits if type(limit) is int and limit > 0)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, where text cannot do without one."""
        if self.tokenizer is None:
            raise InputError(
                f"{self.folder or 'this model'} has no tokenizer (looked for tokenizer.json, vocab.txt, "
                "vocab.json with merges.txt, a SentencePiece .model): give token ids in place of text, "
                "add tokenizer.json, or name one that lies elsewhere (tokenizer)"
            )
        return self.tokenizer

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Return the token ids of each text, special tokens included, cut to `max_length`."""
        return encode(self.text_tokenizer, texts, max_length)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt; where the model continues it, without the token that ends a text."""
        if not isinstance(prompt, str):
            ids = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
            refuse(
                not all(isinstance(token, int) for token in ids),
                f"a prompt is {ids[:4]}: it must be text or a list of token ids, whole numbers",
            )
            return ids
        ids = self.encode([prompt])[0]
        if self.config.family == "decoder" and len(ids) > 1 and ids[-1] in self.stops:
            ids = ids[:-1]
        if not ids and "bos" in self.special:
            ids = [self.special["bos"]]
        return ids

    def save(
        self, folder: str | Path, dtype: torch.dtype | None = None, shard_size: int = SHARD_SIZE
    ) -> None:
        """Write a Hugging Face directory: whole, or not at all. Other files of an existing directory stay."""
        saved = checkpoint.exported(self.config, self.description)
        theirs = dict(saved.theirs)
        if len(self.labels) == self.config.n_classes > 0:
            theirs |= {
                "id2label": {str(number): name for number, name in enumerate(self.labels)},
                "label2id": {name: number for number, name in enumerate(self.labels)},
            }
        if saved is not self.description:  # whose config.json says the special ids
            theirs |= self._named_ids(theirs)
        with files.whole_folder(Path(folder)) as work:
            checkpoint.save_model(work, self.model, replace(saved, theirs=theirs), shard_size, dtype)
            if self.tokenizer is not None:
                save_tokenizer(work, self.tokenizer, self.special, self.settings, self.config.max_positions)
            for name, settings in (("generation_config.json", self.generation), (PREPROCESSOR, self.images)):
                if settings:
                    files.write_json(work / name, settings)
            if self.sentences is not None:
                write_sentences(work, self.sentences, self.config.d_model)

    def _named_ids(self, theirs: dict[str, Any]) -> dict[str, int]:
        """Return special token ids by their names in config.json, all but a padding id that is there."""
        roles = ["bos", "eos", *(["pad"] if theirs.get("pad_token_id") is None else [])]
        if self.config.family == "encoder-decoder":
            roles.append("decoder_start")
        return {f"{role}_token_id": self.special[role] for role in roles if role in self.special}
