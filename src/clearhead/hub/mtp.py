"""Layers for multi-token prediction in checkpoint files, which transformers leaves out and others draft with.

They open as the MTP layers of our models (`variants/mtp.py`) where these can be the file's: the block is like
the model's last one, and the layer's own copies of the embedding and the output layer are the model's. Any
other layer is carried, and written back as it was.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import ConfigPart, Json
from clearhead.hub.fields import field as key
from clearhead.hub.rules import Rule, same
from clearhead.hub.weights import Entry, equal

BLOCK, LAYER = "decoder.blocks.{i}", "model.layers.{i}"  # ours, theirs
COUNT = key("num_nextn_predict_layers", "n_mtp_layers", 0, least=0)


def _read_count(theirs: Json) -> Json:
    named = (theirs.get("architectures") or ["ForCausalLM"])[0]
    return COUNT.read(theirs) if str(named).endswith("ForCausalLM") else {}  # no other head predicts tokens


def _write_one(config: ModelConfig) -> Json:
    return COUNT.write(config.replace(n_mtp_layers=min(config.n_mtp_layers, 1)))


NEXTN = ConfigPart(_read_count, COUNT.write)
NEXT_ONE = ConfigPart(_read_count, _write_one)  # files that have one layer at most
ALIASES = {"num_mtp_layers": "num_nextn_predict_layers"}


@dataclass(frozen=True)
class MTPTensors:
    """Where files have them; in every name {n} stands for the number of layers of the model before it."""

    block: str  # the block of a layer
    modules: Mapping[str, str]  # what it has besides: theirs, ours
    copies: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # theirs: the tensor, our parameter

    def rules(self, config: ModelConfig, rules: tuple[Rule, ...]) -> Iterator[Rule]:
        """Yield the rules for the layers of a model; `rules` are those of its other tensors."""
        for number in range(config.n_mtp_layers):
            block, own = self._named(self.block, config, number), f"mtp.{number}"
            modules = {self._named(name, config, number): f"{own}.{to}" for name, to in self.modules.items()}
            yield from same(modules)
            for rule in rules:
                if rule.ours[0].startswith(BLOCK):
                    yield dataclasses.replace(
                        rule,
                        theirs=rule.theirs.replace(LAYER, block),
                        ours=tuple(name.replace(BLOCK, f"{own}.blocks.0") for name in rule.ours),
                        needs=rule.needs.replace(BLOCK, f"{own}.blocks.0"),
                    )
            for name, (_, parameter) in self.copies.items():
                yield Rule(self._named(name, config, number), (parameter,), copy=True)

    def stored(self, config: ModelConfig, entries: Mapping[str, Entry]) -> int:
        """Return how many of the layers in a file can be those of a model."""
        last = self._within(LAYER.replace("{i}", str(config.n_layers - 1)), entries)
        count = len(self._present(config, entries)) if config.head == "lm" else 0
        return count if all(self._fits(config, entries, number, last) for number in range(count)) else 0

    def _fits(self, config: ModelConfig, entries: Mapping[str, Entry], number: int, last: set[str]) -> bool:
        block = self._named(self.block, config, number)
        besides = [self._named(name, config, number) for name in (*self.modules, *self.copies)]
        extra = {name for name in self._within(block, entries) if (block + name).startswith(tuple(besides))}
        tables = {self._named(name, config, number): table for name, (table, _) in self.copies.items()}
        shared = (
            equal(entry, entries.get(tables[name], entries["model.embed_tokens.weight"]))
            for name, entry in entries.items()
            if name in tables
        )
        return self._within(block, entries) - extra == last and all(shared)

    def carried(self, config: ModelConfig, entries: Mapping[str, Entry]) -> tuple[str, ...]:
        """Return patterns for the tensors of layers in a file of which the model has none."""
        blocks = self._present(config, entries) if config.n_mtp_layers == 0 else []
        return tuple(f"{block}.*" for block in blocks)

    def _present(self, config: ModelConfig, entries: Mapping[str, Entry]) -> list[str]:
        first = f"{next(iter(self.modules))}.weight"
        numbers = itertools.count() if "{n}" in first else range(1)
        there = itertools.takewhile(lambda number: self._named(first, config, number) in entries, numbers)
        return [self._named(self.block, config, number) for number in there]

    @staticmethod
    def _named(name: str, config: ModelConfig, number: int) -> str:
        return name.replace("{n}", str(config.n_layers + number))

    @staticmethod
    def _within(block: str, entries: Mapping[str, Entry]) -> set[str]:
        return {name.removeprefix(block) for name in entries if name.startswith(f"{block}.")}


# After the model's own layers, as many as there are: DeepSeek-V3, GLM-4-MoE.
AFTER = MTPTensors(
    "model.layers.{n}",
    {
        "model.layers.{n}.eh_proj": "embedding.front.project",
        "model.layers.{n}.enorm": "embedding.front.token_norm",
        "model.layers.{n}.hnorm": "embedding.front.hidden_norm",
        "model.layers.{n}.shared_head.norm": "norm",
    },
    {
        "model.layers.{n}.embed_tokens.weight": (
            "model.embed_tokens.weight",
            "decoder.embedding.front.tokens.weight",
        ),
        "model.layers.{n}.shared_head.head.weight": ("lm_head.weight", "head.out.weight"),
    },
)
# Apart from the model, one layer: Qwen3-Next.
APART = MTPTensors(
    "mtp.layers.0",
    {
        "mtp.fc": "embedding.front.project",
        "mtp.pre_fc_norm_embedding": "embedding.front.token_norm",
        "mtp.pre_fc_norm_hidden": "embedding.front.hidden_norm",
        "mtp.norm": "norm",
    },
)
