"""A model as a function from named tensors to named tensors, which is what a graph is traced from.

Names and shapes are those of ONNX files of Hugging Face models, so that programs which run these find what
they expect. Sound keeps clearhead's order of axes, time before bands.

Shapes: B batch, T length, S source length, P earlier tokens, D model, X experts, A active experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig, StackSpec
from clearhead.core.config.kinds import FULL
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Output, Transformer
from clearhead.hub.onnx.past import PastCache
from clearhead.hub.sentences import Sentences
from clearhead.run.kernels.parts import like
from clearhead.run.quant.apply import shared_copy
from clearhead.variants.routing import Experts

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
INPUTS = {"tokens": IDS, "patches": "pixel_values", "vectors": "inputs_embeds", "frames": "input_features"}
OUTPUTS = {"none": "last_hidden_state", "embedding": "embedding"}  # of other heads: logits


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a graph: its axes, by size, or by name where any size will do."""

    name: str
    axes: tuple[str | int, ...]
    dtype: torch.dtype = torch.int64
    below: int = 2  # whole numbers are smaller than this


def ports_of(config: ModelConfig, cache: bool = False) -> list[Port]:
    """Return what goes into the graph of a model."""
    stacks = config.stacks
    ports = _ports_of(stacks[0], "", "source" if len(stacks) == 2 else "length")
    if len(stacks) == 2:
        return ports + _ports_of(stacks[1], "decoder_", "length")
    if cache:
        spec = stacks[0]
        ports[1] = Port(MASK, ("batch", "past + length"))
        for number, names in enumerate(past_names("past_key_values", len(spec.kinds))):
            heads = spec.kv_heads_of(f"{spec.prefix}blocks.{number}.attention")
            for name, width in zip(names, (spec.d_head, spec.d_value)):
                ports.append(Port(name, ("batch", heads, "past", width), torch.float32))
    return ports


def _ports_of(spec: StackSpec, prefix: str, length: str) -> list[Port]:
    name = prefix + INPUTS[spec.input]
    if spec.input == "patches":
        return [Port(name, ("batch", spec.n_channels, *spec.image_size), torch.float32)]
    given = Port(name, ("batch", length), below=spec.vocab_size)
    if spec.input != "tokens":
        given = Port(name, ("batch", length, spec.d_input), torch.float32)
    types = [Port(prefix + TYPES, ("batch", length), below=spec.n_types)] if spec.n_types > 1 else []
    return [given, Port(prefix + MASK, ("batch", length)), *types]


def past_names(prefix: str, layers: int) -> list[tuple[str, str]]:
    """Return the names of the keys and the values of each layer."""
    return [(f"{prefix}.{number}.key", f"{prefix}.{number}.value") for number in range(layers)]


class Function(nn.Module):
    """The model, called with tensors by name. `cache`: keys and values of earlier tokens go in and out."""

    def __init__(self, model: Transformer, sentences: Sentences | None, cache: bool) -> None:
        super().__init__()
        self.model, self.sentences, self.cache = model, sentences, cache
        self.ports = ports_of(model.config, cache)
        self.chooses = any(kind != FULL and kind.chooses for kind in model.main.spec.kinds)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the model; masks are whole numbers, 1 for a token and 0 for padding."""
        stacks, own = self.model.config.stacks, "decoder_" if len(self.model.config.stacks) == 2 else ""
        mask = given[own + MASK].bool() if own + MASK in given else None
        call = {"types": given.get(own + TYPES), "bias": self._bias()}
        if own:
            call["source"], call["source_mask"] = given[INPUTS[stacks[0].input]], given[MASK].bool()
        inputs = given[own + INPUTS[stacks[-1].input]]
        if not self.cache or mask is None:
            return self.named(self.model(inputs, mask, **call), mask)
        layers = len(stacks[0].kinds)
        past = [(given[k], given[v]) for k, v in past_names("past_key_values", layers)]
        before = past[0][0].shape[2]
        cache = PastCache(past, mask[:, :before])
        output = self.model(inputs, mask[:, before:], cache=cache, **call)
        return self.named(output, None) | present(cache)

    def _bias(self) -> Tensor | None:
        """Return a bias of nothing, for which masks are spelled out: plans by blocks depend on the length."""
        return torch.zeros(1, 1, 1, 1) if self.chooses and torch.compiler.is_compiling() else None

    def named(self, output: Output, mask: Tensor | None) -> dict[str, Tensor]:
        """Return what a pass gives, by name."""
        found = {OUTPUTS.get(str(self.model.config.head), "logits"): output.required_logits}
        if self.sentences is not None and mask is not None:
            found = {"sentence_embedding": self.sentences.vectors(output.hidden, mask)} | found
        return found


def present(cache: Cache) -> dict[str, Tensor]:
    """Return the keys and values of every layer of a cache, by name."""
    names = past_names("present", len(cache.layers))
    return {
        name: tensor
        for number, pair in enumerate(names)
        for name, tensor in zip(pair, cache.layers[number].read())
    }


class AllExperts(Experts):
    """A mixture in which every expert answers every token, and those that were not chosen count nothing.

    How many tokens an expert gets is known only from the tokens, which a graph cannot follow.
    """

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        logits = self.router(x)
        weights, chosen = self.choose(logits)  # B T A
        shares = torch.zeros_like(logits).scatter(-1, chosen, weights)  # B T X
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + shares[..., number, None] * expert(x)
        if self.shared is not None and self.shared_gate is not None:
            mixed = mixed + self.shared_gate(x).sigmoid() * self.shared(x)
        return mixed


def traceable(model: Transformer) -> Transformer:
    """Return a copy with the same parameters, whose parts a graph of any length can follow."""
    made = shared_copy(model).eval()
    for name, part in list(made.named_modules(remove_duplicate=False)):
        if isinstance(part, Experts):
            made.set_submodule(name, like(part, AllExperts))
    return made
