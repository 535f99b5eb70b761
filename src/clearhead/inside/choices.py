"""What a head chooses among, by name: tokens of the vocabulary, classes, or the places of a span.

A head's scores are a table of columns and choices. A language model has one column for each token that it
reads; a classifier has one for the whole input; a span head has two, "begins" and "ends", and chooses among
the tokens.

Shapes: B batch, T tokens, C columns, N choices, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.tokens.text import label, visible
from clearhead.inside.inputs import Prepared

KINDS = {"lm": "token", "mlm": "token", "classifier": "class", "tagger": "class", "span": "place"}


@dataclass(frozen=True)
class Choices:
    """The columns and the choices of one prepared input."""

    prepared: Prepared
    kind: str  # token, class or place
    columns: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every class, or every place; tokens are too many, see `name`."""
        if self.kind == "place":
            return tuple(f"{place}:{token}" for place, token in enumerate(self.prepared.tokens.labels))
        return self.prepared.m.class_names

    @property
    def count(self) -> int:
        """How many choices there are."""
        return self.prepared.m.config.vocab_size if self.kind == "token" else len(self.names)

    def name(self, number: int) -> str:
        """Return one choice, as people read it."""
        return label(self.prepared.m.tokenizer, number) if self.kind == "token" else self.names[number]

    def find(self, wanted: str | int) -> int:
        """Return the number of a choice, given its name or its number."""
        if isinstance(wanted, str):
            wanted = self._token(wanted) if self.kind == "token" else self._named(wanted)
        refuse(
            not 0 <= wanted < self.count,
            f"there is no {self.kind} {wanted}: they go from 0 to {self.count - 1}",
        )
        return wanted

    def _named(self, wanted: str) -> int:
        """Return a class or a place by its name, or by its number written out."""
        names = self.names
        if wanted in names:
            return names.index(wanted)
        if wanted.lstrip("-").isdecimal():
            return int(wanted)
        some = ", ".join(names if len(names) <= 12 else (*names[:12], "..."))
        raise InputError(f'there is no {self.kind} "{wanted}"{nearest(wanted, names)}: choose from {some}')

    def _token(self, wanted: str) -> int:
        """Return a token by its own writing, its label (· is a space), its number, or a text that it is."""
        tokenizer = self.prepared.m.tokenizer
        if tokenizer is None:
            refuse(
                not wanted.lstrip("-").isdecimal(),
                f'"{wanted}" is not a token id, and this model has no tokenizer: give a number',
            )
            return int(wanted)
        found = tokenizer.token_to_id(wanted)
        if found is None:
            shown = visible(wanted)
            found = next((token for token in range(self.count) if label(tokenizer, token) == shown), None)
        if found is not None or wanted.isdecimal():
            return int(wanted if found is None else found)
        pieces = tokenizer.encode(wanted, add_special_tokens=False).ids
        listed = ", ".join(label(tokenizer, piece) for piece in pieces) or "none"
        refuse(
            len(pieces) != 1,
            f'"{wanted}" is {len(pieces)} tokens ({listed}): name one token of the vocabulary',
        )
        return int(pieces[0])

    def scores(self, logits: Tensor) -> Tensor:
        """Return what the head says as a table for each row: [B, ...] -> [B, C, N]."""
        if self.kind == "place":
            return logits.transpose(1, 2)
        return logits[:, None] if logits.ndim == 2 else logits

    def column_scores(self, hidden: Tensor, column: int) -> Tensor:
        """Return the scores of one column, and compute no other of a vocabulary: [B, T, D] -> [B, N]."""
        head = self.prepared.model.head
        if self.kind == "token":
            return self.scores(head(hidden[:, column : column + 1], None))[:, 0]
        return self.scores(head(hidden, None))[:, column]


def choices_of(prepared: Prepared) -> Choices:
    """Return what the head of a model chooses among for this input."""
    head = prepared.m.config.head or "none"
    refuse(
        head not in KINDS,
        f'head "{head}" gives vectors, not choices: '
        f"this takes a model whose head is one of {', '.join(KINDS)}",
    )
    whole = ("whole image" if prepared.main.is_floating_point() else "whole text",)
    columns = {"classifier": whole, "span": ("begins", "ends")}.get(head, prepared.tokens.labels)
    return Choices(prepared, KINDS[head], columns)


def find_column(position: int, columns: Sequence[str]) -> int:
    """Return a column by its number; negative ones count from the end."""
    count = len(columns)
    refuse(
        not -count <= position < count,
        f"there is no position {position}: there are {count}, from 0 to {count - 1}, "
        f"or from the end, -1 to -{count}",
    )
    return position % count
