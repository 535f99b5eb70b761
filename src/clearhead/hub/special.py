"""Special tokens: what files name and what a class has anyway, by role; tokens added to a vocabulary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from clearhead.hub.files import read_json_if_any
from clearhead.hub.pieces import UNUSED, sentinels, token_text

ROLES = (
    "bos",
    "eos",
    "unk",
    "sep",
    "pad",
    "cls",
    "mask",
)  # in the order in which those without an id get one
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token

# Classes whose mask takes the space before it, unless a file says otherwise.
MASK_TAKES_SPACE = ("BigBird", "Camembert", "MPNet")

# The special tokens that a class has without any file naming them.
BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
FAIRSEQ = {
    **{"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>"},
    **{"unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
}
LLAMA = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}
USUAL: dict[str, dict[str, str]] = {
    "Roberta": FAIRSEQ,
    "XLMRoberta": FAIRSEQ,
    "Camembert": FAIRSEQ,
    "MPNet": {**FAIRSEQ, "unk": "[UNK]"},
    "GPT2": dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"),
    "Qwen2": dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
    "GPTNeoX": {**dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"), "pad": "<|padding|>"},
    "T5": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "Siglip": {"eos": "</s>", "unk": "<unk>", "pad": "</s>"},
    "CLIP": {**dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"), "bos": "<|startoftext|>"},
    "Marian": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "Llama": LLAMA,
    "CodeLlama": LLAMA,
    "Gemma": {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"},
    "Albert": {**BERT, "unk": "<unk>", "pad": "<pad>", "bos": "[CLS]", "eos": "[SEP]"},
    "BigBird": {**BERT, "unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"},
    "Bert": BERT,
    "DebertaV2": {**BERT, "bos": "[CLS]", "eos": "[SEP]"},
}


# Special tokens for roles of a class's own, by their keys.
OWN_ROLES: dict[str, dict[str, str]] = {
    "CodeLlama": {
        **{"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"},
        **{"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"},
    }
}


def special_tokens(settings: Mapping[str, Any], kind: str = "") -> dict[str, str]:
    """Return special tokens by role, as text: what the files name, else what the class usually has."""
    named = {role: token_text(token) for role, token in _by_role(settings, kind).items()}
    return {role: text for role, text in named.items() if text}


def _by_role(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return special tokens by role, as files state them: null is no token, not the one of the class."""
    usual = USUAL.get(kind, {})
    return {role: settings.get(f"{role}_token", usual.get(role)) for role in ROLES}


def extra_tokens(settings: Mapping[str, Any], kind: str = "") -> list[Any]:
    """Return the special tokens that have no role, as the files state them."""
    listed = settings.get("extra_special_tokens")
    if isinstance(listed, list):
        return listed
    if listed is None and "extra_special_tokens" in settings:
        return []
    older = settings.get("additional_special_tokens")
    listed = older if isinstance(older, list) else []
    if kind == "Camembert" and older is None:
        return [*UNUSED]
    if kind == "T5" and not any("<extra_id_" in str(token_text(token)) for token in listed):
        return [*listed, *sentinels(dict(settings))]
    return listed


def _model_tokens(settings: Mapping[str, Any], kind: str) -> list[Any]:
    """Return special tokens whose role is the model's own, such as `image_token`."""
    roles = {f"{role}_token" for role in ROLES}
    stated = {**OWN_ROLES.get(kind, {}), **settings}
    own = [value for key, value in stated.items() if key.endswith("_token") and key not in roles]
    named = settings.get("extra_special_tokens")
    return [value for value in own if isinstance(value, str)] + [
        *(named if isinstance(named, dict) else {}).values()
    ]


def add_named(
    folder: Path, tokenizer: Tokenizer, kind: str, settings: Mapping[str, Any], stated: Tokenizer | None
) -> None:
    """Add tokens that are never split; those that the vocabulary lacks come after it, in transformers' order.

    First come those with a number: of `added_tokens_decoder`, or else of added_tokens.json and of `stated`,
    the tokenizer.json. Then special tokens by role, those of the model's own roles, and those without one.
    """
    roles = {role: settings.get(f"{role}_token") for role in ROLES}
    by_role = _by_role(settings, kind)
    if kind in MASK_TAKES_SPACE and isinstance(by_role["mask"], str):
        by_role["mask"] = {"content": by_role["mask"], "lstrip": True}
    named = [*by_role.values(), *_model_tokens(settings, kind)]
    others = extra_tokens(settings, kind)
    numbered = settings.get("added_tokens_decoder")
    if numbered is None:
        special = {token_text(token) for token in (*roles.values(), *others)}
        added = read_json_if_any(folder / "added_tokens.json")
        numbers: dict[int, AddedToken] = {
            number: AddedToken(text, normalized=text not in special, special=text in special)
            for text, number in added.items()
        }
        numbers |= stated.get_added_tokens_decoder() if stated is not None else {}
    else:
        numbers = {int(number): _added(token) for number, token in numbered.items()}
    present = tokenizer.get_added_tokens_decoder().values()
    known = {token.content for token in present if token.special or tokenizer is stated}
    known |= {token.content for token in numbers.values()}
    wanted = [numbers[number] for number in sorted(numbers)]
    for token in (*named, *others):
        text = token_text(token)
        # Named again without a role, a token loses the flags that its role gave it.
        twice = token in others and any(isinstance(one, dict) and token_text(one) == text for one in named)
        if text and (text not in known or twice):
            wanted.append(_added(token, special=True))
            known.add(text)
    with_role = {token_text(token) for token in named}
    for token in wanted:
        token.special = token.special or token.content in with_role
    tokenizer.add_tokens(wanted)
    if kind == "Qwen2":
        again = [text for text in map(token_text, (*named, *others)) if text]
        tokenizer.add_tokens([AddedToken(text, special=True) for text in again])
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens", False))


def _added(token: Any, **flags: bool) -> AddedToken:
    """Return an added token that a file states as text or as an object with flags."""
    stated = token if isinstance(token, dict) else {}
    given = {name: bool(value) for name, value in stated.items() if name in FLAGS}
    return AddedToken(token_text(token), **given | flags)
