"""Draw the pictures of the config page, each of fields that are one idea, from what clearhead computes.

    python tools/config_pictures.py

`PICTURES` names for each picture the fields that it shows; `book_tables.py` makes their table below it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import clearhead as ch
from clearhead.app.plot import BLUE, RED, Axes, Figure, draw, name, new, save
from clearhead.core.attention import eager
from clearhead.core.config import RopeScaling
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.positions import alibi_slopes, rope_frequencies, sinusoid
from clearhead.variants.positions import relative_bucket
from clearhead.variants.routing import Experts

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "config"
T = 16  # tokens of a picture
GREY = "#999999"
SMALL: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_positions": T}


def panels(titles: Sequence[str], height: float = 2.6, width: float = 8.4) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes side by side."""
    figure = new(width, height)
    sides = [figure.add_subplot(1, len(titles), number + 1) for number in range(len(titles))]
    for axes, title in zip(sides, titles):
        name(axes, title, "", size=9)
        axes.tick_params(labelsize=7)
    return figure, sides


def tables(found: dict[str, Any], x_name: str, y_name: str, diverging: bool = False, **more: Any) -> Figure:
    """Draw tables of numbers side by side."""
    figure, sides = panels([*found])
    for axes, table in zip(sides, found.values()):
        draw(axes, np.asarray(table, dtype=float), more.get("low"), more.get("high"), diverging)
        axes.set_xlabel(x_name, fontsize=8)
    sides[0].set_ylabel(y_name, fontsize=8)
    return figure


def flows(rows: dict[str, str]) -> Figure:
    """Draw rows of boxes with arrows between them; a box with a star is one that fields switch."""
    figure = new(8.4, 0.25 + 0.52 * len(rows))
    axes = figure.add_subplot()
    axes.set_axis_off()
    longest = max(len(row.split(" > ")) for row in rows.values())
    for height, (title, row) in enumerate(rows.items()):
        axes.text(-0.55, -height, title, ha="right", va="center", fontsize=8, weight="bold")
        for place, word in enumerate(row.split(" > ")):
            box = {"boxstyle": "round", "facecolor": "#dce9f5" if "*" in word else "white", "edgecolor": BLUE}
            axes.text(place, -height, word.replace("*", ""), ha="center", va="center", fontsize=7.5, bbox=box)
            if place:
                style = {"arrowstyle": "->", "color": GREY}
                axes.annotate("", (place - 0.33, -height), (place - 0.67, -height), arrowprops=style)
    axes.set_xlim(-1.5, longest - 0.4)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    return figure


def built(**fields: Any) -> ch.Transformer:
    """Build a small model with these fields."""
    torch.manual_seed(0)
    return ch.Transformer(ch.ModelConfig(**SMALL | fields)).eval()


def seen_by(model: ch.Transformer, pattern: str, layer: int = 0, **given: Any) -> Any:
    """Run a model on T tokens and return which keys each query sees: [T, S]."""
    with torch.no_grad(), ch.record(model, pattern) as seen:
        model(torch.arange(2, 2 + T)[None], **given)
    found = [value for key, value in seen.items() if f"blocks.{layer}." in key]
    return (found[0][0].amax(0) > 0).numpy()


# Size -------------------------------------------------------------------------------------------------------


def draw_size() -> Figure:
    """What doubling a size does to the parameters."""
    base = ch.ModelConfig(vocab_size=4_000, d_model=256, n_layers=6, n_heads=4, d_ff=1024)
    changed = {
        "vocab_size 4,000\nd_model 256\nn_layers 6, d_ff 1,024": {},
        "vocab_size 8,000": {"vocab_size": 8_000},
        "d_model 512": {"d_model": 512},
        "n_layers 12": {"n_layers": 12},
        "d_ff 2,048": {"d_ff": 2048},
        "layer_groups 1": {"layer_groups": 1},
    }
    found = {title: ch.cost(base.replace(**fields)).parameters for title, fields in changed.items()}
    figure, (axes,) = panels(["Parameters"], 3)
    left = np.zeros(len(found))
    for part, colour in zip(("embedding", "attention", "feedforward"), (GREY, BLUE, RED)):
        values = np.array([getattr(one, part) / 1e6 for one in found.values()])
        axes.barh([*found], values, left=left, color=colour, label=part)
        left += values
    axes.invert_yaxis()
    axes.set_xlabel("millions", fontsize=8)
    axes.legend(fontsize=8)
    return figure


def draw_families() -> Figure:
    """Who sees whom in each family."""
    both, source = built(family="encoder-decoder"), torch.arange(2, 12)[None]
    cross = seen_by(both, "*cross.pattern", source=source)
    return tables(
        {
            "decoder": seen_by(built(), "blocks.0.attention.pattern"),
            "encoder": seen_by(built(family="encoder"), "blocks.0.attention.pattern"),
            "encoder-decoder:\nits decoder": seen_by(both, "blocks.0.attention.pattern", source=source),
            "encoder-decoder:\nthe source, across": cross,
        },
        "key",
        "query",
        low=0,
        high=1,
    )


def draw_heads() -> Figure:
    """Query heads that share keys and values, and what a cache of 1,000 tokens then takes."""
    shares, base = (8, 4, 2, 1), ch.ModelConfig(vocab_size=100, d_model=512, n_layers=8, n_heads=8)
    figure, (left, right) = panels(["8 query heads and their key/value heads", "Key/value cache"], 2.8)
    for row, heads in enumerate(shares):
        left.text(-0.9, -row, f"n_kv_heads {heads}", ha="right", va="center", fontsize=8)
        for head in range(8):
            share = head // (8 // heads)
            colour = f"C{share}"
            left.plot(
                [head, share * 8 / heads + (8 / heads - 1) / 2],
                [-row + 0.22, -row - 0.22],
                color=colour,
                lw=1,
            )
            left.scatter(head, -row + 0.22, color=colour, s=26)
        for share in range(heads):
            middle = share * 8 / heads + (8 / heads - 1) / 2
            left.scatter(middle, -row - 0.22, color=f"C{share}", marker="s", s=34)
    left.set_xlim(-4, 8)
    left.set_axis_off()
    bytes_of = [ch.cost(base.replace(n_kv_heads=heads), 1000).memory.kv_cache / 1e6 for heads in shares]
    right.barh([f"n_kv_heads {heads}" for heads in shares], bytes_of, color=BLUE)
    right.invert_yaxis()
    right.set_xlabel("MB for 1,000 tokens, 8 layers, heads of 64", fontsize=8)
    return figure


# Embedding --------------------------------------------------------------------------------------------------


def draw_inputs() -> Figure:
    """An image cut into squares, and frames that convolutions halve."""
    figure, (left, right) = panels(
        ["patches: image_size (32, 48), patch_size 8", "frames: two convolutions"], 2.8
    )
    rows, columns = np.mgrid[:32, :48]
    left.imshow(np.sin(rows / 5) * np.cos(columns / 7), cmap="Greys")
    for edge in range(0, 48, 8):
        left.axvline(edge - 0.5, color=RED, lw=1)
    for edge in range(0, 32, 8):
        left.axhline(edge - 0.5, color=RED, lw=1)
    left.set_xlabel("6 x 4 squares: 24 vectors, and one more with class_token", fontsize=8)
    for height, (word, stride) in enumerate(
        (("d_input numbers each", 1), ("conv_kernel 3", 1), ("conv_stride 2", 2))
    ):
        places = np.arange(0, 12, stride)
        right.scatter(places, np.full(len(places), height), color=BLUE, s=24)
        right.text(12, height, f"{len(places)} frames: {word}", va="center", fontsize=8)
        for place in places if height else ():
            for reach in (-1, 0, 1):
                if 0 <= place + reach < 12:
                    right.plot([place + reach, place], [height - 1, height], color=GREY, lw=0.6)
    right.set_xlim(-1, 22)
    right.set_axis_off()
    return figure


def draw_embedding() -> Figure:
    """From ids to the stream, and back."""
    return flows(
        {
            "in": "ids > token table > projection*\nd_embedding > × embedding\n_scale* > + types*\n+ places "
            "> norm* > stream",
            "out": "stream > norm > token table,\ntransposed* > logits",
        }
    )


# Positions --------------------------------------------------------------------------------------------------


def draw_positions() -> Figure:
    """What each scheme adds or multiplies, for 16 positions."""
    where = torch.arange(T)
    distance = where[:, None] - where[None]
    learned = built(d_model=T, n_heads=2).decoder.positions.table.weight.detach()
    turns = rope_frequencies(T, 10_000.0, None, T, where)[0]
    rope = (distance[..., None] * turns).cos().mean(-1)  # the score of a key equal to its query
    alibi = -alibi_slopes(4)[1] * distance.abs()
    torch.manual_seed(3)
    relative = torch.randn(32)[relative_bucket(distance, True, 32, 128)]
    return tables(
        {
            "learned: a table\n(columns: width)": learned[:T],
            "sinusoidal: waves\n(columns: width)": sinusoid(where, T),
            "rope: score of equals\n(columns: keys)": rope,
            "alibi: bias of a head\n(columns: keys)": alibi,
            "relative: bias of a head\n(columns: keys)": relative,
        },
        "",
        "position",
        diverging=True,
    )


def draw_waves() -> Figure:
    """Sinusoids in both layouts, and with the slowest wave at its end."""
    where = torch.arange(40)
    return tables(
        {
            "interleaved": sinusoid(where, 32),
            "half": sinusoid(where, 32, "half"),
            "sinusoid_ends": sinusoid(where, 32, "half", ends=True),
        },
        "width",
        "position",
        diverging=True,
    )


def cosines(**fields: Any) -> Any:
    """The cosines by which a head of width 16 is rotated at 64 positions: [64, 16]."""
    model = built(positions="rope", max_positions=64, d_model=64, **fields)
    rotated = model.decoder.positions.rotary(torch.arange(64)[None], None).cos[0, 0]
    rest = torch.ones(64, 16 - rotated.shape[1])  # not rotated
    return torch.cat([rotated, rest], 1)


def draw_rope() -> Figure:
    """Cosines of the angles by position and place in a head."""
    return tables(
        {
            "rope_base 10,000": cosines(),
            "rope_base 1,000,000": cosines(rope_base=1e6),
            "rope_fraction 0.5": cosines(rope_fraction=0.5),
            'rope_layout "interleaved"': cosines(rope_layout="interleaved"),
        },
        "place in the head",
        "position",
        diverging=True,
    )


def draw_rope_scaling() -> Figure:
    """How far each kind of scaling stretches the waves."""
    figure, (axes,) = panels(["Waves of a head of 64, trained on 2,048 tokens, factor 4"], 3)
    where = torch.arange(8192)
    plain = rope_frequencies(64, 10_000.0, None, 2048, where)[0]
    for kind in ("linear", "dynamic", "llama3", "yarn"):
        scaling = RopeScaling(kind=kind, factor=4.0, original_positions=2048)  # type: ignore[arg-type]
        axes.plot(plain / rope_frequencies(64, 10_000.0, scaling, 8192, where)[0], label=kind)
    axes.set_xlabel("pair: fast waves on the left, slow ones on the right", fontsize=8)
    axes.set_ylabel("times as long", fontsize=8)
    axes.legend(fontsize=8)
    return figure


def draw_buckets() -> Figure:
    """Which bias a distance gets."""
    figure, (left, right) = panels(["Buckets of relative positions", "ALiBi: bias by distance, 4 heads"], 3)
    distance = torch.arange(200)
    for buckets, furthest in ((32, 128), (16, 128), (32, 64)):
        found = relative_bucket(-distance, False, buckets, furthest)
        left.plot(distance, found, label=f"relative_buckets {buckets}, relative_max_distance {furthest}")
    left.legend(fontsize=6.5)
    for slope in alibi_slopes(4):
        right.plot(distance, -slope * distance, label=f"slope {float(slope):.4g}")
    right.set_ylim(-20, 1)
    right.legend(fontsize=6.5)
    for axes in (left, right):
        axes.set_xlabel("tokens between query and key", fontsize=8)
    return figure


# Attention --------------------------------------------------------------------------------------------------


def draw_masks() -> Figure:
    """Which keys each query sees, by the kind of attention."""
    kinds = ("full", "window(4)", "window(4, sinks=2)", "dilated(3, 2)", "strided(4)")
    found = {}
    for kind in kinds:
        found[kind] = seen_by(built(attention=kind), "blocks.*.attention.pattern")
    return tables(found, "key", "query", low=0, high=1)


def weights_of(scores: torch.Tensor, **given: Any) -> list[float]:
    """Return the softmax of scores [S] as attention computes it."""
    q = torch.ones(1, 1, 1, 1)
    k, v = scores.view(1, 1, -1, 1), torch.eye(len(scores))[None, None]
    return eager(q, k, v, scale=given.pop("scale", 1.0), **given)[0, 0, 0].tolist()


def draw_scores() -> Figure:
    """The same five scores, through scale, soft-cap and sink; and the gate."""
    scores = torch.tensor([8.0, 6.0, 2.0, 0.0, -4.0])
    found = {
        "attention_scale 1": weights_of(scores),
        "attention_scale 1/4": weights_of(scores, scale=0.25),
        "attention_softcap 3": weights_of(scores, softcap=3.0),
        "scale 1/4, attention_sink": weights_of(scores, scale=0.25, sink=torch.tensor([2.0])),
    }
    figure, (left, middle, right) = panels(
        ["Weights of the scores 8, 6, 2, 0, -4", "qk_norm", "attention_gate"], 3
    )
    for at, (title, values) in enumerate(found.items()):
        left.bar(np.arange(5) + 0.2 * at - 0.3, values, 0.2, label=f"{title}: sum {sum(values):.2f}")
    left.legend(fontsize=6)
    lengths = torch.linspace(0.1, 4, 50)
    middle.plot(lengths, 16 * lengths.square(), label='"none"')
    middle.plot(lengths, torch.full_like(lengths, 16.0), label='"head"')
    middle.set_xlabel("size of query and key", fontsize=8)
    middle.set_ylabel("largest score, heads of 16", fontsize=8)
    middle.legend(fontsize=7)
    gates = torch.linspace(-6, 6, 60)
    right.plot(gates, gates.sigmoid(), color=BLUE)
    right.set_xlabel("projection of the token", fontsize=8)
    right.set_ylabel("what is left of the result", fontsize=8)
    return figure


# Feed-forward -----------------------------------------------------------------------------------------------


def draw_activations() -> Figure:
    """The bends, and a gate with its clamp."""
    figure, (left, right) = panels(["activation", 'gated: activation(gate) · up, "silu"'], 3)
    x = torch.linspace(-4, 3, 200)
    for title, bend in ACTIVATIONS.items():
        left.plot(x, bend(x), label=title)
    left.set_ylim(-0.6, 4)
    left.legend(fontsize=7)
    wide, bend = torch.linspace(-4, 12, 200), ACTIVATIONS["silu"]
    for up in (1.0, 2.0):
        right.plot(wide, bend(wide) * up, label=f"up {up:g}")
    right.plot(wide, bend(wide.clamp(max=7)) * 2, "--", label="up 2, gated_clamp 7")
    right.plot(wide, bend(wide) * (1 + 1), ":", label="up 1, gated_shift 1")
    right.set_xlabel("gate", fontsize=8)
    right.legend(fontsize=7)
    return figure


def draw_experts() -> Figure:
    """The weights that a router gives: rows are tokens, columns experts."""
    torch.manual_seed(1)
    logits, found = 1.5 * torch.randn(10, 8), {}
    for title, fields in {
        "n_active_experts 2,\ntopk_softmax": {},
        "n_active_experts 4": {"n_active_experts": 4},
        "softmax_topk": {"router_order": "softmax_topk"},
        "softmax_topk, not\nrouter_renormalise": {
            "router_order": "softmax_topk",
            "router_renormalise": False,
        },
    }.items():
        router = next(part for part in built(n_experts=8, **fields).modules() if isinstance(part, Experts))
        weights, chosen = router.choose(logits)
        found[title] = torch.zeros(10, 8).scatter(1, chosen, weights)
    found["n_experts 8: what\nthe router said"] = logits.softmax(-1)
    return tables(found, "expert", "token", low=0, high=1)


# The rest ---------------------------------------------------------------------------------------------------


def draw_residuals() -> Figure:
    """Where norms stand around a sublayer."""
    return flows(
        {
            "pre": "x > norm* > f > + x > next",
            "post": "x > f > + x > norm* > next",
            "sandwich": "x > norm* > f > norm* > + x",
            "output": "x > f > norm* > + x > next",
            "parallel": "x > one norm,\nor two* > attention and\nfeedforward > both + x > next",
            "residual_scale": "x > norm > f > × residual\n_scale* > + x",
            "at the end": "last block > final_norm* > head",
        }
    )


def draw_norms() -> Figure:
    """One vector through each norm."""
    torch.manual_seed(0)
    x = torch.randn(12) + 1.5
    figure, sides = panels(["a vector", "layernorm", "rmsnorm", "by size, and norm_eps"], 2.6)
    centred = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
    for axes, values in zip(sides, (x, centred, x / (x.square().mean() + 1e-5).sqrt())):
        axes.bar(range(12), values, color=[RED if value < 0 else BLUE for value in values])
        axes.axhline(float(values.mean()), color="black", lw=1, ls="--")
        axes.set_ylim(-3, 4)
    sides[0].set_xlabel("dashed: the mean", fontsize=8)
    sizes = torch.logspace(-4, 1, 60)
    for eps in (1e-5, 1e-2):
        sides[3].semilogx(sizes, sizes / (sizes.square() + eps).sqrt(), label=f"eps {eps:g}")
    sides[3].set_xlabel("size before", fontsize=8)
    sides[3].legend(fontsize=7)
    return figure


def draw_biases() -> Figure:
    """Which parts have a bias, by what is set."""
    settings: dict[str, dict[str, Any]] = {
        "bias True": {},
        "bias False": {"bias": False},
        "... and qkv_bias": {"bias": False, "qkv_bias": True},
        "... and attention_out_bias": {"bias": False, "attention_out_bias": True},
        "... and feedforward_bias": {"bias": False, "feedforward_bias": True},
        "... and norm_bias": {"bias": False, "norm_bias": True},
    }
    places = (
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.out",
        "feedforward.up",
        "feedforward.down",
    )
    places = (*places, "attention_residual.before", "feedforward_residual.before")
    names = [{key for key, _ in built(**setting).named_parameters()} for setting in settings.values()]
    table = np.array([[f"decoder.blocks.0.{place}.bias" in found for place in places] for found in names])
    assert table[0].all(), "a part was renamed"
    figure, (axes,) = panels(["A bias in"], 2.8)
    labels = [place.replace("_residual.before", " norm") for place in places]
    draw(axes, table.astype(float), 0, 1)
    axes.set_yticks(range(len(settings)), [*settings])
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    return figure


def draw_depth() -> Figure:
    """Tokens that skip layers, and rows of a batch that do while training."""
    torch.manual_seed(0)
    random = torch.rand(6, T)
    kept = torch.ones(6, T)
    for layer in range(1, 6, 2):
        kept[layer] = (random[layer].argsort().argsort() < T // 4).float()
    dropped = (torch.rand(6, T) >= 0.2).float()
    figure, sides = panels(["depth_capacity 0.25", "layer_drop 0.2, in training"], 2.4)
    for axes, table, x_name in zip(sides, (kept, dropped), ("token", "row of the batch")):
        draw(axes, table.numpy(), 0, 1)
        axes.set_xlabel(x_name, fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
    return figure


def draw_dropout() -> Figure:
    """Where values are dropped while training."""
    return flows(
        {
            "embedding": "token table > + positions > embedding\n_dropout* > stream",
            "attention": "q · k > softmax > attention\n_dropout* > · v > out > dropout* > + stream",
            "feedforward": "up > activation > feedforward\n_dropout* > down > dropout* > + stream",
        }
    )


def draw_output() -> Figure:
    """From the last norm to what comes out."""
    return flows(
        {
            "lm, mlm": "hidden > head_transform*\n(head_activation) > token table,\nhead_bias* "
            "> a logit for\neach token",
            "classifier": "hidden > pooling* > pooler* > n_classes* > a logit for\neach class",
            "tagger, span": "hidden > head_layer* > n_classes,\nor 2 ends > logits for\neach token",
            "embedding": "hidden > pooling* > pooler* > normalise* > one vector",
            "none": "hidden",
        }
    )


def draw_logits() -> Figure:
    """Probabilities of five logits by scale, and the soft-cap."""
    logits = torch.tensor([6.0, 4.0, 2.0, 1.0, -2.0])
    figure, (left, right) = panels(["Probabilities of the logits 6, 4, 2, 1, -2", "logit_softcap 30"], 2.8)
    for at, scale in enumerate((0.25, 0.5, 1.0)):
        values = (logits * scale).softmax(-1)
        left.bar(np.arange(5) + 0.25 * at - 0.25, values, 0.25, label=f"logit_scale {scale:g}")
    left.legend(fontsize=7)
    x = torch.linspace(-90, 90, 100)
    right.plot(x, 30 * (x / 30).tanh(), color=BLUE)
    right.plot(x, x, color=GREY, ls=":")
    right.set_ylim(-45, 45)
    right.set_xlabel("logit before", fontsize=8)
    return figure


def draw_init() -> Figure:
    """The spread of fresh weights by matrix and by depth."""
    parts = ("attention.q", "attention.out", "feedforward.up", "feedforward.down")
    figure, sides = panels(["2 layers", "24 layers"], 2.8)
    for axes, layers in zip(sides, (2, 24)):
        for at, init in enumerate(("gpt2", "bert", "xavier")):
            named = dict(built(init=init, n_layers=layers).named_parameters())
            values = [float(named[f"decoder.blocks.0.{part}.weight"].detach().std()) for part in parts]
            axes.bar(np.arange(4) + 0.27 * at - 0.27, values, 0.27, label=init)
        axes.set_xticks(range(4), [part.split(".")[1] for part in parts])
        axes.axhline(0.02, color="black", lw=1, ls="--", label="init_std 0.02")
    sides[0].set_ylabel("standard deviation", fontsize=8)
    sides[1].legend(fontsize=7)
    return figure


class Drawn(NamedTuple):
    """How a picture is drawn, and the fields that it shows."""

    make: Callable[[], Figure]
    fields: str

    @property
    def shown(self) -> list[str]:
        """The names of the fields."""
        return self.fields.split()


ACTIVATED = "activation gated gated_clamp gated_shift gate_scale up_scale feedforward_skips"
PICTURES = {
    "size": Drawn(draw_size, "vocab_size d_model n_layers d_ff layer_groups loop n_mtp_layers"),
    "families": Drawn(
        draw_families,
        "family n_encoder_layers n_encoder_heads d_encoder_head d_encoder_ff source_vocab_size "
        "share_embeddings",
    ),
    "heads": Drawn(draw_heads, "n_heads n_kv_heads d_head d_value pruned_heads"),
    "inputs": Drawn(
        draw_inputs,
        "input image_size patch_size n_channels class_token patch_bias d_input conv_kernel conv_stride",
    ),
    "embedding": Drawn(
        draw_embedding,
        "d_embedding embedding_projection project_tokens embedding_scale n_types embedding_norm "
        "tie_embeddings smear_gate bigrams",
    ),
    "positions": Drawn(draw_positions, "positions max_positions max_encoder_positions position_offset"),
    "waves": Drawn(draw_waves, "sinusoid_layout sinusoid_ends"),
    "rope": Drawn(
        draw_rope, "rope_base rope_local_base rope_fraction rope_layout rope_skips rope_sections rope_axial"
    ),
    "rope-scaling": Drawn(draw_rope_scaling, "rope_scaling"),
    "buckets": Drawn(draw_buckets, "relative_buckets relative_max_distance relative_terms relative_norm"),
    "masks": Drawn(draw_masks, "attention window"),
    "scores": Drawn(
        draw_scores,
        "attention_scale attention_softcap attention_sink qk_norm attention_gate head_gate value_residual "
        "value_embeddings",
    ),
    "activations": Drawn(draw_activations, ACTIVATED),
    "experts": Drawn(
        draw_experts,
        "n_experts n_active_experts d_expert d_shared_expert router_order router_renormalise router_bias "
        "router_groups n_active_groups router_correction router_scale shared_expert_gate "
        "dense_layers",
    ),
    "residuals": Drawn(
        draw_residuals,
        "norm_position first_norm parallel parallel_norms residual_scale final_norm input_skips mirror_skips",
    ),
    "norms": Drawn(draw_norms, "norm norm_eps norm_unit_offset"),
    "biases": Drawn(draw_biases, "bias qkv_bias key_bias attention_out_bias feedforward_bias norm_bias"),
    "depth": Drawn(draw_depth, "depth_capacity layer_drop"),
    "dropout": Drawn(draw_dropout, "dropout embedding_dropout attention_dropout feedforward_dropout"),
    "output": Drawn(
        draw_output,
        "head n_classes pooling pooler pooler_bias pooler_norm normalise head_transform head_layer "
        "head_activation head_bias",
    ),
    "logits": Drawn(draw_logits, "logit_scale logit_softcap"),
    "init": Drawn(draw_init, "init init_std zero_init"),
}


def main() -> None:
    """Draw the pictures that are named, or all."""
    for one in sys.argv[1:] or PICTURES:
        save(PICTURES[one].make(), FOLDER / f"{one}.png")
        print(one, flush=True)


if __name__ == "__main__":
    main()
