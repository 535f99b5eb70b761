"""Vectors of SPLADE and ColBERT: how they come about, how two are compared, what the files say of them.

SPLADE gives a text a weight for each token of the vocabulary, most of them 0. ColBERT gives a vector to each
token of a text; a query and a document are as alike as the sum, over the query's tokens, of the largest dot
product with a token of the document (MaxSim, late interaction).

Shapes: K weights that are not 0, V vocabulary, T tokens of a text, Q tokens of a query, D width of a vector.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as nnf
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.hub.files import refuse, refuse_key

Role = Literal["query", "document"]

# Sparse vectors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector as wide as the vocabulary, of which few numbers are not 0."""

    ids: Tensor  # K tokens, ascending
    weights: Tensor  # K, float32
    width: int  # V

    def dense(self) -> Tensor:
        """Return all numbers [V]."""
        return torch.zeros(self.width).index_put((self.ids,), self.weights)

    def dot(self, other: "SparseVector") -> float:
        """Return the dot product with another vector."""
        _, mine, its = np.intersect1d(
            self.ids.numpy(), other.ids.numpy(), assume_unique=True, return_indices=True
        )
        return float(self.weights.double()[mine] @ other.weights.double()[its])

    def unit(self) -> "SparseVector":
        """Return the same vector, scaled to length one."""
        return SparseVector(self.ids, nnf.normalize(self.weights, dim=0), self.width)


LOGS = {"relu": 1, "log1p_relu": 2}  # by activation_function: how often log(1 + x) is taken of relu(logits)


@dataclass(frozen=True)
class Splade:
    """How the logits of a masked language model become a sparse vector."""

    pooling: str = "max"  # or "sum", over the tokens of a text
    activation: str = "relu"  # of LOGS
    most: int | None = None  # so many weights are kept, the largest
    cosine: bool = False  # vectors are compared by their cosine, not their dot product

    def pool(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return what is pooled of a text, of which these are the logits [T, V] of some tokens: [V].

        `before` [V] is what was pooled of the tokens before them; of none, 0.
        """
        weights = logits.float().relu()
        for _ in range(LOGS[self.activation]):
            weights = weights.log1p()
        return before + weights.sum(0) if self.pooling == "sum" else torch.maximum(before, weights.amax(0))

    def vector(self, pooled: Tensor) -> SparseVector:
        """Return what is pooled [V] without what is 0."""
        few = self.most is not None and int(pooled.count_nonzero()) > self.most
        ids = pooled.topk(self.most or 0).indices.sort().values if few else pooled.nonzero()[:, 0]
        return SparseVector(ids, pooled[ids], len(pooled))

    def compared(self, vector: SparseVector) -> SparseVector:
        """Return the vector of which a dot product tells how alike two texts are."""
        return vector.unit() if self.cosine else vector

    def compare(self, query: SparseVector, documents: Sequence[SparseVector]) -> list[float]:
        """Return how alike the query and each document are."""
        query_vector = self.compared(query)
        return [query_vector.dot(self.compared(document)) for document in documents]


def read_splade(stated: Mapping[str, Any], named: Mapping[str, Any], folder: Path) -> Splade:
    """Read a SpladePooling's config.json in a folder, and config_sentence_transformers.json."""
    pooling, activation = (
        str(stated.get(key) or usual)
        for key, usual in (("pooling_strategy", "max"), ("activation_function", "relu"))
    )
    refuse_key(pooling not in ("max", "sum"), "pooling_strategy", pooling, "choose max or sum", folder)
    choices = f"choose {' or '.join(LOGS)}"
    refuse_key(activation not in LOGS, "activation_function", activation, choices, folder)
    most, by = named.get("max_active_dims"), named.get("similarity_fn_name") or "dot"
    wrong = most is not None and (type(most) is not int or most < 1)
    refuse_key(wrong, "max_active_dims", most, "it must be a whole number of 1 at least, or null", folder)
    refuse_key(by not in ("dot", "cosine"), "similarity_fn_name", by, "choose dot or cosine", folder)
    return Splade(pooling, activation, most, by == "cosine")


# Late interaction -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expansion:
    """How a query is made longer: by copies of a token, whose vectors are compared with documents too."""

    length: int  # tokens of a query, with these
    cuts: bool = True  # a longer query is cut to this length
    attend: bool = False  # the other tokens see the copies
    token: str | None = None  # None: the mask, or, without one, the end of a text


@dataclass(frozen=True)
class LateInteraction:
    """How a text becomes a vector for each of its tokens, and which of them are compared."""

    markers: Mapping[str, str] = field(default_factory=dict)  # by role: a token after a text's first one
    lengths: Mapping[str, int] = field(default_factory=dict)  # by role: tokens of a text at most
    expansion: Expansion | None = None  # of queries
    skipped: tuple[str, ...] = ()  # tokens whose vectors are left out
    skips: tuple[str, ...] = ("document",)  # of texts of these roles
    mean: bool = False  # MaxSim is divided by the number of the query's tokens

    def room(self, role: Role, positions: int, usual: int) -> int:
        """Return the most tokens that are read of a text, of a model of so many positions.

        `usual` is where nothing is stated for the role.
        """
        stated = self.lengths.get(role)
        if role == "query" and self.expansion is not None:
            least = self.expansion.length
            stated = least if self.expansion.cuts else max(stated or usual, least)
        return usual if stated is None else min(stated, positions)

    def marker(self, role: Role, tokenizer: Tokenizer) -> int | None:
        """Return the id of the token that marks texts of a role; None: there is none."""
        marker = self.markers.get(role)
        if not marker:
            return None
        ids = (tokenizer.token_to_id(name) for name in (marker, marker.strip()))
        token_id = next((token for token in ids if token is not None), None)
        refuse(token_id is None, f"the tokenizer has no token {marker!r}, which marks a {role}: add it")
        return token_id

    def expanded(self, ids: list[int], tokenizer: Tokenizer, special: Mapping[str, int]) -> list[int]:
        """Return a query with the copies that make it longer."""
        if self.expansion is None:
            return ids
        named = self.expansion.token
        token = special.get("mask", special.get("eos")) if named is None else tokenizer.token_to_id(named)
        if token is None:
            name = named or "for masks or the end of a text"
            refuse(True, f"queries are made longer, and the tokenizer has no token {name}")
            raise AssertionError
        return ids + [token] * (self.expansion.length - len(ids))

    def left_out(self, role: Role, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of tokens whose vectors are left out of texts of a role; unknown words are none."""
        words = self.skipped if role in self.skips else ()
        return [token for token in map(tokenizer.token_to_id, words) if token is not None]

    def compare(self, query: Tensor, documents: Sequence[Tensor]) -> list[float]:
        """Return how alike the query [Q, D] and each document [T, D] are; one without tokens scores 0."""
        if not documents:
            return []
        dots = torch.cat([*documents]) @ query.T  # tokens of all documents, Q
        share = max(1, len(query)) if self.mean else 1
        parts = torch.split(dots, [len(document) for document in documents])
        return [float(part.amax(0).sum()) / share if len(part) else 0.0 for part in parts]


PUNCTUATION = tuple(string.punctuation)
STRATEGIES = {"fixed": True, "min": False}  # of query_expansion, and whether it cuts
Stated = Mapping[str, Any]


def read_expansion(stated: Any, path: Path) -> Expansion | None:
    """Read what a file says under query_expansion."""
    if stated is None:
        return None
    known = isinstance(stated, Mapping) and {*stated} <= {"strategy", "attend", "token", "length"}
    right = known and stated.get("strategy") in STRATEGIES and isinstance(stated.get("attend", False), bool)
    refuse_key(
        not right,
        "query_expansion",
        stated,
        f"it must have strategy {' or '.join(STRATEGIES)}, length, and perhaps attend and token",
        path,
    )
    length = _length(stated, "length", path)
    refuse_key(length is None, "query_expansion", stated, "it needs a length", path)
    assert length is not None
    return Expansion(length, STRATEGIES[stated["strategy"]], bool(stated.get("attend")), stated.get("token"))


def _length(stated: Stated, key: str, path: Path) -> int | None:
    value = stated.get(key)
    wrong = value is not None and (type(value) is not int or value < 1)
    refuse_key(wrong, key, value, "it must be a whole number of 1 at least, or null", path)
    return value


def _lengths(stated: Stated, keys: Mapping[str, str], path: Path, usual: Mapping[str, int]) -> dict[str, int]:
    """Return the most tokens by role, under these keys of a file, or as usual."""
    lengths = {role: _length(stated, key, path) or usual.get(role) for role, key in keys.items()}
    return {role: length for role, length in lengths.items() if length is not None}


LENGTHS = {"query": "query_length", "document": "document_length"}


def read_native(reads: Stated, mask: Stated | None, named: Stated, path: Path) -> LateInteraction:
    """Read a MultiVectorEncoder of sentence-transformers.

    Args:
        reads: sentence_bert_config.json.
        mask: the config.json of its MultiVectorMask; None: it has none.
        named: config_sentence_transformers.json.
        path: the directory, for messages.
    """
    expansion = read_expansion(reads.get("query_expansion"), path)
    refuse(
        expansion is not None and mask is None,
        f"{path} has a query_expansion and no MultiVectorMask, which has its tokens compared: add one",
    )
    mask = mask or {}
    only = mask.get("keep_only_token_ids")
    refuse_key(only, "keep_only_token_ids", only, "only null is supported", path)
    words, tasks = mask.get("skiplist_words") or [], mask.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    _check_words(words, path)
    by = named.get("similarity_fn_name") or "maxsim"
    choices = "choose maxsim or meanmaxsim"
    refuse_key(by not in ("maxsim", "meanmaxsim"), "similarity_fn_name", by, choices, path)
    skips = tuple(task for task in tasks if task in ("query", "document"))
    return LateInteraction(
        {}, _lengths(reads, LENGTHS, path, {}), expansion, tuple(words), skips, by == "meanmaxsim"
    )


def read_pylate(named: Stated, path: Path) -> LateInteraction:
    """Read config_sentence_transformers.json of PyLate, with its defaults for what is not there."""
    lengths = _lengths(named, LENGTHS, path, {"query": 32, "document": 180})
    prefixes = {"query": named.get("query_prefix", "[Q] "), "document": named.get("document_prefix", "[D] ")}
    wrong = not all(isinstance(prefix, str | None) for prefix in prefixes.values())
    refuse(wrong, f"{path} must have query_prefix and document_prefix of text: {prefixes}")
    words = named.get("skiplist_words")
    _check_words(words or [], path)
    expands = named.get("do_query_expansion") is not False
    attend = bool(named.get("attend_to_expansion_tokens", named.get("attend_to_mask_tokens")))
    return LateInteraction(
        {role: prefix for role, prefix in prefixes.items() if prefix},
        lengths,
        Expansion(lengths["query"], attend=attend) if expands else None,
        PUNCTUATION if words is None else tuple(words),
        mean=named.get("similarity_fn_name") == "meanmaxsim",
    )


def read_stanford(metadata: Stated, path: Path) -> LateInteraction:
    """Read artifact.metadata of a ColBERT of Stanford, with its defaults for what is not there."""
    for key, usual in (("similarity", "cosine"), ("interaction", "colbert")):
        value = metadata.get(key, usual)
        refuse_key(value != usual, key, value, f"only {usual} is supported", path)
    keys = {"query": "query_maxlen", "document": "doc_maxlen"}
    lengths = _lengths(metadata, keys, path, {"query": 32, "document": 220})
    return LateInteraction(
        {
            "query": str(metadata.get("query_token_id") or "[unused0]"),
            "document": str(metadata.get("doc_token_id") or "[unused1]"),
        },
        lengths,
        Expansion(lengths["query"], attend=bool(metadata.get("attend_to_mask_tokens"))),
        PUNCTUATION if metadata.get("mask_punctuation", True) else (),
    )


def _check_words(words: Any, path: Path) -> None:
    listed = isinstance(words, list) and all(isinstance(word, str) for word in words)
    refuse_key(not listed, "skiplist_words", words, "it must be a list of texts", path)


# Writing ----------------------------------------------------------------------------------------------------


def splade_pooling(splade: Splade) -> dict[str, Any]:
    """Return a SpladePooling's config.json."""
    return {"pooling_strategy": splade.pooling, "activation_function": splade.activation}


def splade_model(splade: Splade) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says of a SparseEncoder."""
    most = {} if splade.most is None else {"max_active_dims": splade.most}
    by = "cosine" if splade.cosine else "dot"
    return {"model_type": "SparseEncoder", "similarity_fn_name": by, **most}


def pylate_model(late: LateInteraction) -> dict[str, Any]:
    """Return what `read_pylate` reads."""
    expansion = late.expansion
    return {
        "model_type": "ColBERT",
        **({"similarity_fn_name": "meanmaxsim"} if late.mean else {}),
        "query_prefix": late.markers.get("query", ""),
        "document_prefix": late.markers.get("document", ""),
        "query_length": late.lengths.get("query") if expansion is None else expansion.length,
        "document_length": late.lengths.get("document"),
        "do_query_expansion": expansion is not None,
        "attend_to_expansion_tokens": expansion is not None and expansion.attend,
        "skiplist_words": list(late.skipped),
    }


def native_model(late: LateInteraction) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says of a MultiVectorEncoder."""
    by = "meanmaxsim" if late.mean else "maxsim"
    return {"model_type": "MultiVectorEncoder", "similarity_fn_name": by}


def native_mask(late: LateInteraction) -> dict[str, Any]:
    """Return a MultiVectorMask's config.json."""
    return {"skiplist_words": list(late.skipped), "skiplist_tasks": list(late.skips)}


def native_reads(late: LateInteraction) -> dict[str, Any]:
    """Return what sentence_bert_config.json says of lengths and expansion."""
    names = {cuts: name for name, cuts in STRATEGIES.items()}
    expansion = late.expansion and {
        "strategy": names[late.expansion.cuts],
        "attend": late.expansion.attend,
        "token": late.expansion.token,
        "length": late.expansion.length,
    }
    return {**{LENGTHS[role]: length for role, length in late.lengths.items()}, "query_expansion": expansion}
