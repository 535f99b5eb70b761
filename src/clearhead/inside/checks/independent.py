"""Rows of the equality suite that compare with what shares no code with the model: the float64 reference, and
transformers, which opens the same directory; and the rows of quantized models and of two towers.

A fault that strikes both sides of an equality is seen here. On the user's own weights something may be too
small to show, so two copies are made with the same code and other weights:

    lively    large random weights, norms and biases too, windows and clamps tight enough to matter
    quiet     weights so small that what every norm reads is as small as its eps, which decides the output

A quantized model is compared, at the same tolerance as any model, with the reference over its dequantized
weights. The matmuls of generation round their inputs too: they must stay within the error that they state,
and each row must equal the row alone, bit for bit.

Shapes: B rows, T tokens, D width in, N width out.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.core.feedforward import FeedForward
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, MissingExtraError, refuse
from clearhead.hub.registry import ONE_TOWER, tower_path
from clearhead.hub.towers import JoinedTowers
from clearhead.inside.checks.long import long_rows, reach
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.inside.checks.rows import (
    TOLERANCE,
    Comparison,
    Inputs,
    cache_forms,
    fast,
    forward_rows,
    gap,
    inside_rows,
    saved,
    through,
)
from clearhead.learn.tasks.generation import prompts_of
from clearhead.learn.tasks.images import ImagePrompt, vectors_of
from clearhead.run.api import Model, load
from clearhead.run.generate.decode import decode, greedy
from clearhead.run.generate.request import Request
from clearhead.run.generate.vectors import Span, axes_of, embedded
from clearhead.run.kernels.parts import Direct
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.apply import dequantized
from clearhead.run.quant.layers import QuantizedLinear, quantized_parts, rounding_bound
from clearhead.variants.checks import read_kind
from clearhead.variants.contexts import edit
from clearhead.variants.images import patches_of
from clearhead.variants.kinds import shortened
from clearhead.variants.towers import pair_loss

REFERENCE_TOLERANCE = 1e-4
REFERENCE_LENGTH = 40  # of a row, where no threshold of the config is longer
NEW_TOKENS = 50
RULED_OUT = -1e5
WINDOW, CLAMP = 4, 0.5  # in the lively copy, at most
TABLES = ("tokens.weight", "types.weight", "table.weight", "class_token")


def formula_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows for the model itself, its lively and its quiet copy."""
    own, narrow = inputs.of(inputs.model, fewer=1), TOLERANCE[torch.float32]
    large = functools.cache(lambda: own.of(lively(inputs.model)))
    expected = functools.cache(lambda: _formula(large()))
    row = functools.partial(own.compare, tolerance=narrow, copies=True)
    return [
        own.compare(
            "model = formula",
            "logits with those of a plain loop in float64 over the same weights",
            lambda own: gap(own.run(), _formula(own)),
        ),
        row(
            "model = formula (lively)",
            "the same with large random weights: tokens, padding, far positions, short windows",
            lambda _: _lively(large(), expected()),
        ),
        row(
            "model = formula (quiet)",
            "the same where everything is as small as norm_eps",
            lambda _: _quiet(own.of(quiet(large().model))),
        ),
        row(
            "cached = formula (lively)",
            "the same through each form of cache, in chunks of 1, 3 and 2 tokens",
            lambda _: max(
                gap(through(large(), form(), [1, 3, 2]), expected()) for form in cache_forms(large()).values()
            ),
            fits=inputs.caches,
        ),
        *long_rows(inputs, large),
    ]


def _formula(inputs: Inputs, arguments: Mapping[str, Tensor] | None = None, loudness: float = 1.0) -> Tensor:
    """Return the logits of the formula."""
    config, weights = inputs.model.config, inputs.model.state_dict()
    tensors = arguments or inputs.arguments
    return reference_logits(config, weights, **tensors, loudness=loudness, learns=inputs.model.training)


def _lively(inputs: Inputs, expected: Tensor) -> float:
    """Compare plain input; where rows can be padded, gaps too, and positions beyond the trained length."""
    gaps = [gap(inputs.run(), expected)]
    if inputs.sequences:
        (padded, slots), config = inputs.padded("gaps"), inputs.model.config
        count = torch.arange(padded["ids"].shape[1], device=inputs.device)
        far = torch.where(count < inputs.length // 2, count, count + config.max_positions)
        beyond = {**padded, "positions": far.expand(inputs.rows, -1)}
        for arguments in [padded] if config.bounded else [padded, beyond]:
            both = inputs.model(**arguments).logits.cpu(), _formula(inputs, arguments)
            ours, theirs = (logits[:, slots.cpu()] if logits.ndim == 3 else logits for logits in both)
            gaps.append(gap(ours, theirs))
    return max(gaps)


def _quiet(inputs: Inputs) -> float:
    """Compare the quiet copy. Sinusoids are not weights: with them, both sides scale the embedding."""
    model, config = inputs.model, inputs.model.config
    loud = 1.0 if config.positions != "sinusoidal" or config.embedding_norm else math.sqrt(config.norm_eps)
    embeddings = [f"{spec.prefix}embedding" for spec in config.stacks]
    changes: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(embeddings, lambda x: x * loud)
    with edit(model, changes):
        return gap(inputs.run(), _formula(inputs, loudness=loud), least=0.0)


# Copies with other weights ----------------------------------------------------------------------------------


@torch.no_grad()
def lively(model: Transformer, seed: int = 0) -> Transformer:
    """Return a float32 copy with large random weights, short windows, and clamps that they reach."""
    model_copy = copy.deepcopy(model).float()
    limit = model.config.gated_clamp and min(model.config.gated_clamp, CLAMP)
    model_copy.config = config = model.config.replace(
        window=_shorter(model.config.window), attention=_shorter(model.config.attention), gated_clamp=limit
    )
    for part in model_copy.modules():
        if isinstance(part, FeedForward) and part.clamp is not None:
            part.clamp = limit
    for stack, spec in zip((model_copy.encoder, model_copy.decoder), (config.encoder, config.decoder)):
        if stack is not None and spec is not None:
            stack.spec = dataclasses.replace(stack.spec, kinds=spec.kinds)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model_copy.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.device)
        if name.endswith(TABLES):
            weight.copy_(noise)
        elif weight.ndim == 1:
            weight.copy_(0.3 * noise + float(name.endswith("weight") and not config.norm_unit_offset))
        else:
            weight.copy_(noise / math.sqrt(weight[0].numel()))
    return model_copy


def _shorter(window: Any) -> Any:
    if isinstance(window, tuple):
        return tuple(map(_shorter, window))
    if isinstance(window, str):
        return str(shortened(read_kind(window), WINDOW))
    return None if window is None else min(window, WINDOW)


@torch.no_grad()
def quiet(lively: Transformer) -> Transformer:
    """Return a copy of a lively model in which all that a norm reads is about the root of its eps.

    What enters the residual stream is made small; what a norm before a sublayer has made large again is made
    small where the sublayer answers. Gains of the norms that are read by a sublayer, or by the head, stay.
    """
    model_copy, config, small = copy.deepcopy(lively), lively.config, math.sqrt(lively.config.norm_eps)
    queries = ("q.weight", "k.weight") if config.qk_norm != "none" else ()
    before = config.norm_position in ("pre", "sandwich")
    answers = ("out.weight", "down.weight", *queries) if before else ()
    for name, weight in model_copy.named_parameters():
        after_a_norm = (".blocks." in name and name.endswith(answers)) or (
            name == "head.transform.weight" and config.final_norm
        )
        into_stream = ".inside." in name or ".after." in name or ".embedding.norm." in name
        if into_stream and name.endswith("weight") and config.norm_unit_offset:
            weight.copy_((1 + weight) * small - 1)
        elif into_stream or after_a_norm or name.endswith(("bias", *TABLES)) or ".front." in name:
            weight.mul_(small)
    return model_copy


# transformers -----------------------------------------------------------------------------------------------


def reference_rows(m: Model | Transformer) -> list[Comparison]:
    """Return the rows about logits, or hidden states where there are none, and about greedy tokens."""
    if not isinstance(m, Model) or m.folder is None:
        raise InputError(
            "a comparison with transformers needs the directory: pass what ch.load gave, not a bare model"
        )
    if m.towers is not None:
        return reference_towers(m)
    if m.image_encoder is not None:
        return reference_images(m)
    refuse(
        tower_path(m.folder) or (m.description is not None and m.description.kind in ONE_TOWER),
        f"{m.folder} is one part of two: the comparison with transformers is of both, in their directory",
    )
    named_class, folder = their_class(m), m.folder
    kind = "hidden state" if m.config.head in ("none", "embedding") else "logit"
    largest, tokens = f"largest difference of a {kind}", f"of {NEW_TOKENS} greedy tokens, how many differ"

    @functools.cache
    def opened() -> tuple[Inputs, Any]:
        """Open the directory in both, in float32."""
        where, named = (folder, {}) if folder.is_dir() else (folder.parent, {"gguf_file": folder.name})
        theirs = named_class.from_pretrained(where, attn_implementation="eager", dtype=torch.float32, **named)
        length = reach(m.config, usual=REFERENCE_LENGTH)
        rows = 1 if length > REFERENCE_LENGTH else None
        inputs = Inputs(load(folder, dtype=torch.float32).model.eval(), rows, length)
        stated = getattr(theirs.config, "pad_token_id", None)
        padding = {m.config.position_offset - 1, -1 if stated is None else int(stated)}
        inputs.main = _real_tokens(inputs.main, padding)
        if "source" in inputs.arguments:
            inputs.arguments["source"] = _real_tokens(inputs.arguments["source"], padding)
        return inputs, theirs.eval()

    return [
        Comparison("clearhead = transformers", largest, lambda: _difference(*opened()), REFERENCE_TOLERANCE),
        Comparison(
            "greedy tokens = transformers",
            tokens,
            lambda: _wrong_tokens(*opened()),
            tolerance=0.0,
            fits=m.config.head == "lm",
        ),
    ]


def their_class(m: Model) -> Any:
    """Return the class of transformers that a directory names."""
    theirs = m.description.theirs if m.description is not None else {}
    names = theirs.get("architectures") or [None]
    named_class = getattr(_transformers(), str(names[0]), None)
    refuse(
        named_class is None,
        f"transformers has no class {names[0]} to compare with: this model is clearhead's own",
    )
    return named_class


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("a comparison with transformers needs it: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    return transformers


def _difference(inputs: Inputs, their_model: Any) -> float:
    """Return the largest difference, absolute, as parity is published."""
    main, source = inputs.main, _whole_source(inputs)
    if source is not None:
        out = inputs.model(main, source=source)
        theirs = their_model(**_read(inputs, source), decoder_input_ids=main)
    else:
        types = {"token_type_ids": torch.zeros_like(main)} if inputs.model.config.n_types else {}
        marked = inputs.arguments.get("global_mask")
        named = types if marked is None else {**types, "global_attention_mask": marked.long()}
        out = inputs.model(main, global_mask=marked)
        theirs = their_model(**{"pixel_values" if inputs.kind == "patches" else "input_ids": main}, **named)
    if "logits" in theirs:
        return _largest(out.logits, theirs.logits.reshape(out.logits.shape))  # one class may have no axis
    if "prediction_logits" in theirs:
        return _largest(out.logits, theirs.prediction_logits)
    if "start_logits" in theirs:
        spans = torch.stack([theirs.start_logits, theirs.end_logits], dim=-1)
        answers = spans > RULED_OUT  # some classes put the tokens of a question below any score
        return _largest(out.logits[answers], spans[answers])
    return _largest(out.hidden, theirs.last_hidden_state)


def _wrong_tokens(inputs: Inputs, their_model: Any) -> float:
    """Return how many greedy tokens are not those that transformers writes."""
    model, source = inputs.model, _whole_source(inputs)
    learned, room = model.config.bounded, model.config.max_positions - 4
    tokens = max(1, min(NEW_TOKENS, room)) if learned else NEW_TOKENS
    read: dict[str, Any]
    if source is None:
        prompt = inputs.main[:1, :4]
        read = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    else:
        source, prompt = source[:1], inputs.main[:1, :1]
        read = {**_read(inputs, source), "decoder_input_ids": prompt, "decoder_start_token_id": int(prompt)}
    their_model.generation_config = type(their_model.generation_config)()  # no rules of the model's own
    from transformers import GenerationMixin

    theirs = GenerationMixin.generate(  # nor, of speech, windows and timestamps
        their_model,
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        **read,
    )[:, prompt.shape[1] :]
    ours = greedy(model, prompt, tokens, source=source)
    return float((ours[:, : theirs.shape[1]] != theirs).sum())


def _real_tokens(x: Tensor, padding: set[int]) -> Tensor:
    """Replace padding ids: some classes count positions, or find the last token, by where they stand."""
    if x.is_floating_point():
        return x
    other = next(number for number in range(len(padding) + 1) if number not in padding)
    return torch.where(torch.isin(x, torch.tensor(sorted(padding), device=x.device)), other, x)


def _whole_source(inputs: Inputs) -> Tensor | None:
    """Return what the encoder reads; of frames as many as it has positions for, which the reference asks."""
    source = inputs.arguments.get("source")
    if source is None or inputs.source_kind != "frames":
        return source
    spec = inputs.model.config.stacks[0]
    times = math.ceil(spec.max_positions * spec.conv_stride / source.shape[1])
    return torch.cat([source] * times, dim=1)[:, : spec.max_positions * spec.conv_stride]


def _read(inputs: Inputs, source: Tensor) -> dict[str, Tensor]:
    """Return the encoder's input by the reference's name; its frames stand as columns."""
    frames = inputs.source_kind == "frames"
    return {"input_features": source.transpose(1, 2)} if frames else {"input_ids": source}


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


# Quantized models -------------------------------------------------------------------------------------------


REPLACED = ("fast copy = model", "saved = loaded", "built = config", "pruned = masked", "device = CPU")
FAST_TOLERANCE = 5e-2  # of logits, relative to the largest: inputs have 8 bits in every layer
ROWS = 5  # of a matmul, whose tiles have four
SLACK = 1e-5  # of float32 sums, added to the stated error


def quantized_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows of a quantized model."""
    row, kept = inputs.compare, [*forward_rows(inputs), *inside_rows(inputs, compile=False)]
    return [
        row(
            "quantized = dequantized",
            "logits with those of its weights in floating point",
            lambda inputs: gap(inputs.run(), inputs.of(dequantized(inputs.model)).run()),
        ),
        row(
            "model = formula",
            "logits with those of a plain loop in float64 over the weights that the codes stand for",
            lambda inputs: gap(inputs.run(), _formula(inputs.of(dequantized(inputs.model)))),
            copies=True,
        ),
        *(shared for shared in kept if shared.name not in REPLACED),
        row(
            "product = stated error",
            "the matmuls of generation with those of the weights: the largest difference, as a share of the "
            "error they state",
            _stated,
            tolerance=1.0,
        ),
        row(
            "product: batched = alone",
            "each row of the matmuls of generation with the row by itself, bit for bit",
            _alone,
            tolerance=0.0,
        ),
        row(
            "fast copy = model",
            "the copy that generation uses, which rounds inputs to 8 bits, with the model",
            fast,
            tolerance=FAST_TOLERANCE,
            fits=inputs.model.config.head == "lm",
        ),
        row("saved = loaded", "codes and logits of a copy on disk, bit for bit", saved, [], tolerance=0.0),
    ]


def _matmuls(inputs: Inputs) -> list[tuple[QuantizedLinear, Direct, torch.Tensor]]:
    """Return each quantized layer, what generation has in its place, and random inputs [B, D]."""
    replaced, layers = dict(prepared(inputs.model).named_modules()), []
    generator = torch.Generator().manual_seed(0)
    for name, part in quantized_parts(inputs.model).items():
        if isinstance(part, QuantizedLinear):
            x = torch.randn(ROWS, part.in_features, generator=generator).to(inputs.device, inputs.dtype)
            layers.append((part, replaced[name], x))
    return layers


def _stated(inputs: Inputs) -> float:
    worst, slack = 0.0, max(SLACK, float(torch.finfo(inputs.dtype).eps))  # relative to an output
    for layer, quick, x in _matmuls(inputs):
        exact = layer(x).float()
        allowed = rounding_bound(layer, x) + slack * (1 + exact.abs())
        worst = max(worst, float(((quick(x).float() - exact).abs() / allowed).max()))
    return worst


def _alone(inputs: Inputs) -> float:
    return max(
        float((quick(x) - torch.cat([quick(row[None]) for row in x])).abs().max())
        for _, quick, x in _matmuls(inputs)
    )


# Images in a prompt -----------------------------------------------------------------------------------------


def reference_images(m: Model) -> list[Comparison]:
    """Return the rows that compare a prompt with an image, for a model loaded from its directory."""
    assert m.image_encoder is not None and m.folder is not None
    folder, table = m.folder, m.image_encoder.table
    kind = getattr(_transformers(), table.named)

    def given(ids: list[int], pixels: Tensor) -> dict[str, Tensor]:
        config, row = m.image_encoder.config, torch.tensor([ids])  # type: ignore[union-attr]
        if config.any_size:
            grid = torch.tensor([[1, *(side // config.tower.patch_size for side in pixels.shape[2:])]])
            kinds = (row == config.token_id).int()
            inputs = {"pixel_values": patches_of(config, pixels)[0], "image_grid_thw": grid}
            return {"input_ids": row, **inputs, "mm_token_type_ids": kinds}
        # Of each prompt its tiles.
        return {"input_ids": row, "pixel_values": pixels if table.prompt is None else pixels[None]}

    @functools.cache
    def both() -> tuple[Model, Any, list[int], Tensor]:
        theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ours = load(folder, dtype=torch.float32)
        assert ours.image_encoder is not None
        config, generator = ours.image_encoder.config, torch.Generator().manual_seed(0)
        words = torch.randint(ours.config.vocab_size, (AROUND, 2), generator=generator)
        before, after = words.masked_fill(words == config.token_id, config.token_id - 1 or 1).T.tolist()
        frame = (2 * config.multiple, 3 * config.multiple) if config.any_size else config.frame or (0, 0)
        pixels = torch.randn(1, config.tower.n_channels, *frame, generator=generator)
        count = config.takes(config.squares(pixels.shape)) if config.any_size else config.count
        return ours, theirs, [*before, *[config.token_id] * count, *after], pixels

    def logits() -> float:
        ours, theirs, ids, pixels = both()
        row = torch.tensor([ids])
        expected = theirs(**given(ids, pixels)).logits
        own = vectors_of(ours, ids, ImagePrompt(ids, list(pixels)))
        spans = [Span(own, 0, len(ids))]
        axes = axes_of(spans, torch.arange(len(ids))[None])
        return gap(ours.model(row, vectors=embedded(ours.model, row, spans), axes=axes).logits, expected)

    def tokens() -> float:
        ours, theirs, ids, pixels = both()
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = theirs.generate(**given(ids, pixels), **options)[0, len(ids) :]
        rows = decode(
            ours.model,
            Request(max_new_tokens=NEW_TOKENS),
            prompts_of(ours, [ids], [ImagePrompt(ids, list(pixels))]),
        )
        return float(sum(a != b for a, b in zip(rows[0].ids, expected.tolist(), strict=True)))

    largest = "largest difference of a logit, of a prompt with an image"
    differ = f"of {NEW_TOKENS} greedy tokens, how many differ"
    return [
        Comparison("image = transformers", largest, logits, PARITY),
        Comparison("image tokens = transformers", differ, tokens, 0.0),
    ]


# Two towers -------------------------------------------------------------------------------------------------


PARITY = 1e-5
AROUND = 5  # tokens before an image, and after it
PAIRS, END = 3, 2  # random pairs of a text and an image; tokens after the end of the first text


def named(tower: str, rows: Iterable[Comparison]) -> list[Comparison]:
    """Return rows whose names say which tower they are about."""
    return [dataclasses.replace(row, name=f"{tower}: {row.name}") for row in rows]


def reference_towers(m: Model) -> list[Comparison]:
    """Return the rows that compare both towers with transformers, for a model loaded from its directory."""
    assert m.towers is not None and m.folder is not None
    folder, kind = m.folder, getattr(_transformers(), m.towers.description.table.named)

    @functools.cache
    def both() -> dict[str, tuple[Tensor, Tensor]]:
        """Return both outputs for the same pairs, in float32, by name."""
        theirs = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ours = load(folder, dtype=torch.float32).towers
        assert ours is not None
        ids, pixels = random_pairs(ours)
        expected = theirs(input_ids=ids, pixel_values=pixels, return_loss=True)
        output = ours(ids, pixels)
        return {
            "texts": (output.texts, expected.text_embeds),
            "images": (output.images, expected.image_embeds),
            "similarities": (output.logits, expected.logits_per_image),
            "loss": (pair_loss(output.logits, ours.config.loss), expected.loss),
        }

    def difference(name: str) -> float:
        return gap(*both()[name])

    largest = "largest difference, relative to the largest value above 1, of"
    return [
        Comparison(f"{name} = transformers", f"{largest} {name}", functools.partial(difference, name), PARITY)
        for name in ("texts", "images", "similarities", "loss")
    ]


def random_pairs(towers: JoinedTowers) -> tuple[Tensor, Tensor]:
    """Return random ids [N, T], whose ends differ where an end counts, and pixels [N, C, height, width]."""
    config, generator = towers.config, torch.Generator().manual_seed(0)
    length, end = config.text.max_positions, config.end_id
    ids = torch.randint(config.text.vocab_size, (PAIRS, length), generator=generator)
    if end is not None and end >= 0:
        ids = ids.masked_fill(ids == end, 0 if end else 1)
        for row in range(PAIRS):
            ids[row, max(length - 1 - END * row, 0) :] = end
    height, width = config.frame or (0, 0)
    return ids, torch.randn(PAIRS, config.image.n_channels, height, width, generator=generator)
