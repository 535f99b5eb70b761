"""The recipe's section `[data]`: what is learned from, and how it becomes batches."""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from clearhead.errors import ConfigError, check_least, check_types, refuse

Task: TypeAlias = str  # the name of an entry of `tasks.table`, which checks it
Format = Literal[
    "text", "jsonl", "tsv", "csv", "conll", "parallel", "lines", "arrow", "folders", "idx", "npz", "corpus"
]


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Where examples come from and how they are laid out."""

    paths: tuple[str, ...] = ()  # files, folders, globs, or the name of an embedded corpus
    task: Task | None = None  # None: guessed from the data, with a note
    format: Format | None = None  # None: guessed from names and content, with a note
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)  # role = column: {label = "stars"}
    header: bool | None = None  # tsv, csv: whether the first line names the columns; None: guessed
    # of text files, such as latin-1; None: UTF-8, a byte order mark's, or Western, with a note
    encoding: str | None = None
    pattern: str | None = None  # lines: a regular expression with named groups such as source and target
    texts_only: bool = False  # lm, mlm, denoise: take the texts of rows with labels, tags or pairs
    lowercase: bool | Literal["source", "target"] = False  # of all texts; pairs: or of one side
    validation: tuple[str, ...] = ()  # files to validate on; none: a share of the data is set apart
    validation_share: float = 0.1  # of the examples (of the characters, where text is one document)
    # rows that cannot be read: an error, or left out and counted
    bad_rows: Literal["refuse", "skip"] = "refuse"
    max_examples: int | None = None  # read no more than this
    max_length: int | None = None  # tokens of a row; None: what the model takes
    # lm: rows across documents, or documents apart; chat: a conversation a row, or several that stay apart
    packing: Literal["stream", "isolated"] = "stream"
    batch_size: int = 32  # rows of a batch
    batch_tokens: int | None = None  # pairs: tokens of a batch, with padding, in place of batch_size
    # lm, texts with labels, tags: share of the tokens read in training that become the unknown token, in lm
    # others of the text
    token_dropout: float = 0.0
    # lm, mlm, denoise, texts with labels, tags, pairs: share of a BPE tokenizer's merges that are skipped in
    # training, other ones in each epoch, such as 0.1
    bpe_dropout: float = 0.0
    mask_share: float = 0.15  # mlm: share of tokens to predict; denoise: share of tokens in spans
    span_length: float = 3.0  # denoise: mean length of a span
    # image: side of the square that pictures are brought to, by resizing the shorter side and cropping the
    # middle; None: that of the base, else their own size where all have one, else at most 224
    image_size: int | None = None
    augment: tuple[Literal["flip", "shift", "erase", "mix"], ...] = ()  # image: changes drawn for each epoch
    stride: int = 64  # answer: tokens by which windows of a long context overlap
    cache: str | None = None  # folder of the encoded ids; None: next to the output

    def __post_init__(self) -> None:
        check_types(self)
        if self.encoding is not None:
            refuse(
                not _is_encoding(self.encoding),
                f"data.encoding {self.encoding!r} is no encoding of text: name one such as utf-8, latin-1, "
                "cp1252, utf-16 or shift_jis",
                ConfigError,
            )
        for name in ("validation_share", "mask_share"):
            share = getattr(self, name)
            refuse(not 0 < share < 1, f"{name} {share} must lie between 0 and 1", ConfigError)
        for name in ("token_dropout", "bpe_dropout"):
            share = getattr(self, name)
            refuse(not 0 <= share < 1, f"{name} {share} must lie in [0, 1)", ConfigError)
        check_least(
            self, 1, "batch_size", "batch_tokens", "max_examples", "max_length", "span_length", "image_size"
        )
        check_least(self, 0, "stride")


def _is_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # what turns bytes into bytes, such as hex, is refused too
        codecs.getincrementaldecoder(name)
    except (LookupError, UnicodeError, ValueError):
        return False
    return True
