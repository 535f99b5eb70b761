"""Title, shape, formula and reason of each step of a trace, and the letters of its shapes.

In formulas `x` is the result of the step before. Names in braces are filled in from the model. A step without
an entry is shown by its name.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig

LEGEND = {
    "B": "batch: one row",
    "T": "query tokens: the length of this stack's input",
    "S": "key tokens: T in self-attention, the source's length in cross-attention",
    "D": "width of the model",
    "W": "width of the token table, where it is not D",
    "H": "heads",
    "K": "key/value heads",
    "E": "width of a head",
    "Ev": "width of a value head, where it is not E",
    "R": "columns of a head that are rotated",
    "Kd": "key heads of a recurrent layer (in Mamba-2: groups)",
    "Hd": "value heads of a recurrent layer",
    "Ed": "width of its key heads",
    "Vd": "width of its value heads",
    "Cd": "columns that its convolution reads: those of all queries, keys and values",
    "Cl": "width of the latent that keys and values are made of",
    "Cq": "width of the latent that queries are made of",
    "F": "width of the feed-forward",
    "Fx": "width of an expert, where it is not F",
    "Fs": "width of the shared expert",
    "X": "experts",
    "A": "experts that each token visits",
    "V": "vocabulary",
    "C": "classes",
    "N": "patches of the image",
    "I": "width of one input vector",
    "Tin": "frames before the stride",
    "top": "candidates shown",
    "channels": "of the image",
    "height": "of the image, in pixels",
    "width": "of the image, in pixels",
    "patch": "side of a patch, in pixels",
}


class Words(NamedTuple):
    """The explanation of one value of the forward pass; names in braces are filled in from the model."""

    title: str
    symbols: str  # its shape, in the letters of the trace's legend
    formula: str  # x is the result of the step before
    why: str


def _table(text: str) -> dict[str, Words]:
    """Read a table of words: step | title | shape | formula | why; a long why has a line of its own."""
    rows = (" ".join(row.split()).split(" | ") for row in re.split(r"\n(?! )", text.strip()) if row[0] != "#")
    return {name: Words(*words) for name, *words in rows}


INPUTS = ("tokenize", "ids", "pixels", "vectors")
WORDS = _table(
    """
# Input
tokenize | tokenize | T 2 | text → tokens |
    A model reads tokens of a fixed vocabulary; these are the characters behind each token.
ids | ids | B T | token → its number |
    Each token has a number: the row of its vector in the table.
pixels | pixels | B channels height width | image → numbers |
    The image at the size, and on the scale, that the model was trained on.
vectors | vectors | B {Tin} I | as given | The input is a row of vectors already.
# Embedding
embedding.front.tokens | embed | B T {W} | table[ids] |
    Each token becomes a vector, learned in training: what it means before its neighbours are known.
embedding.vectors | embed | B T D | table[ids], and images |
    Each token becomes a vector; where an image stands, its patches have theirs from the image encoder.
embedding.front.scaled | scale | B T {W} | x · {embedding_scale} |
    Makes the token's vector large next to the vectors that are added to it.
embedding.front.patches | patches | B N channels·patch·patch | cut, then flatten |
    An image has no words, so squares of it take their place.
embedding.front.project | project | B {N} D | x · W{front_bias} |
    Brings each input vector to the width of the model.
embedding.front.class_token | class token | B T D | [class token; x] |
    A learned vector that stands for no patch gathers what the whole image shows.
embedding.front.first | first convolution | B D Tin | conv(x) | Each frame takes in its neighbours in time.
embedding.front.first_bent | activate | B D Tin | gelu(x) | Without a bend, two convolutions would be one.
embedding.front.second | second convolution | B D T | conv(x) |
    Takes in neighbours again, with a stride that shortens the row.
embedding.front.second_bent | activate | B T D | gelu(x) |
    Bends the result, so that what follows is more than one linear map.
embedding.types | types | B T {W} | table[types] | A vector that says which of two texts a token belongs to.
embedding.typed | add types | B T {W} | x + types | Each token now carries the text it belongs to.
embedding.placed | add positions | B T {W} | x + positions | Each token now carries where it stands.
embedding.norm | norm | B T {W} | {norm}(x) | Brings every token's vector to one scale before the first block.
embedding.project | widen | B T D | x · W + b |
    The table is narrower than the model, to save weights, and is widened here.
positions.table | positions | 1 T {W} | table[0, 1, 2, …] |
    A learned vector for each position: attention itself knows no order.
positions.places.table | positions | 1 T {W} | table[0, 1, 2, …] |
    A learned vector for each position, next to the bias by distance.
positions.norm | norm | R D | {norm}(table) | Brings the vectors of distances to one scale.
positions.which | distances | 1 T S | bucket of query − key |
    Which vector stands for the distance of each pair.
positions.waves | positions | 1 T {W} | sin, cos of the position |
    Waves of many lengths give each position a vector of its own: attention itself knows no order.
positions.rotary | angles | 2 1 1 T R | cos, sin of position · frequency |
    By how much queries and keys will be rotated at each position.
positions.rotary.local | angles, local | 2 1 1 T R | cos, sin of position · frequency |
    The same at the base that layers with a window have.
positions.bias | position bias | 1 H T S | {bias} |
    What will be added to a score for the distance between two tokens.
counts | repeated keys | 1 1 T S | ln(times) |
    A key that stands in the softmax several times weighs as much more.
mask | attention mask | 1 1 T S | {mask} | True where a token may look at another one.
norm | final norm | B T D | {norm}(x) | The last states are brought to one scale for whoever reads them.
# Attention
attention.q | query | B T H·E | x · Wq{qkv_bias} | What each token looks for.
attention.k | key | B S K·E | x · Wk{key_bias} | What each token offers to be found by.
attention.v | value | B S K·{Ev} | x · Wv{qkv_bias} | What each token hands over when it is found.
attention.q_heads | split heads, q | B H T E | B T H·E → B H T E |
    Each head looks for something else, with its own share of the columns.
attention.k_heads | split heads, k | B K S E | B S K·E → B K S E |
    Each head has its own keys; fewer than queries where heads share them.
attention.v_heads | split heads, v | B K S {Ev} | B S K·E → B K S E |
    Each head has its own values; fewer than queries where heads share them.
attention.q_norm | norm q | {q_normed} | {norm}(q) | Keeps scores from growing with the size of the queries.
attention.k_norm | norm k | {k_normed} | {norm}(k) | Keeps scores from growing with the size of the keys.
attention.q_rotated | rotate q | B H T E | q rotated by its position |
    Rotated queries and keys fit by their distance, so order enters the scores.
attention.k_rotated | rotate k | B K S E | k rotated by its position |
    Rotated queries and keys fit by their distance, so order enters the scores.
attention.z | {z} | B H T {Ev} | {z_formula} |
    Each token takes in the values of those it looks at, by their shares.
attention.mixed | mix values | B H T {Ev} | pattern · v |
    Each token takes in the values of those it looks at, by their shares.
attention.gate | gate | {gate} | {gate_of} · Wg{qkv_bias} |
    How much of what the heads find each token will let through.
attention.concat | concatenate | B T H·{Ev} | B H T E → B T H·E | What the heads found is laid side by side.
attention.out | output | B T D | z · Wo{out_bias} |
    Mixes what the heads found, and brings it to the width of the stream.
attention.scores | scores | B H T S | q · kᵀ | How well each query fits each key.
attention.scaled | scale | B H T S | scores · {scale} |
    Long vectors make large dot products; the scale keeps softmax from choosing one key alone.
attention.softcapped | soft-cap | B H T S | {softcap} · tanh(scores / {softcap}) |
    Bounds the scores smoothly, so that none runs away.
attention.by_distance | meet distances | B H T S | (q · k(d) + q(d) · k) · {scale} |
    Content meets position: how far away a key stands counts by what the query, or the key, says.
attention.biased | add bias | B H T S | scores + position bias | Distance enters the scores.
attention.masked | mask | B H T S | {hidden} |
    What a token may not see gets the lowest score, and so no weight.
attention.pattern | softmax | B H T S | softmax(scores) |
    Scores become shares: how much each token takes from each other one, one in all.
# Cross-attention, where it differs
cross.q | query | B T H·E | x · Wq{qkv_bias} | What each token being written looks for in the source.
cross.k | key | B S K·E | memory · Wk{key_bias} | What each token of the source offers to be found by.
cross.v | value | B S K·{Ev} | memory · Wv{qkv_bias} |
    What each token of the source hands over when it is found.
cross.masked | mask | B H T S | {hidden} | Every token of the source may be seen: nothing is hidden.
# Residual stream
residual.before | norm | B T D | {norm}(x) |
    The sublayer reads the stream at one scale, whatever its size has become.
residual.inside | inner norm | B T D | {norm}(y) |
    What the sublayer says is brought to one scale before it is added.
residual.scaled | scale | B T D | y · {residual_scale} | How much a sublayer adds, relative to the stream.
residual.add | residual | B T D | x + y |
    The stream goes on, and the sublayer only adds to it: so depth loses nothing.
residual.after | post norm | B T D | {norm}(x) | The stream itself is brought back to one scale.
# The token before
previous.gate | gate of the token before | B T 1 | x[:n] · W + b | How much of it this token takes over.
previous.before | embedding before | B T D | x of the token before | Zeros for the first one.
previous.smeared | add it | B T D | x + s · sigmoid(gate) · before | Two tokens in a row are often one thing.
previous.pairs | vectors of pairs | B T D | table[hash(before, id)] | A vector for two tokens together.
previous.paired | add them | B T D | x + pairs | The first layer knows the pair at once.
# Shortcuts between layers
shortcut.mirrored | add the mirrored layer | B T D | x + w · y |
    What a layer of the first half left comes back.
shortcut.mixed | add the first input | B T D | a · x + b · x0 | What each token was at first stays at hand.
shortcut.values | values of the first layer | B K T {Ev} | a · v + b · v1 |
    What a token says stays close to what it was at first.
shortcut.table | values of the token | B T K·{Ev} | table[id] | A vector for each token, for this layer alone.
shortcut.added | add them | B K T {Ev} | v + table | Attention mixes values that name their token.
# Mixture of depths
router | router | B T | x · w | How much a token needs this layer.
passed | choice of tokens | B T | score > 0, or the best | Tokens that go through; the others pass by.
mixed | mix | B T D | x + score · (layer(x) − x) |
    Tokens that went through take as much of the layer as their score says.
# Feed-forward
feedforward.router | router | B T X | x · Wr{router_bias} | How well each expert suits each token.
feedforward.chosen | choice of experts | B·T A | the best {n_active} of {among} |
    Each token visits a few experts, so that weights are many and work is little.
feedforward.weights | weights of experts | B·T A | {router} |
    How much of each chosen expert's answer a token takes.
feedforward.sorted | sort by expert | B·T·A D | rows of x, by expert |
    Tokens of one expert are laid together, so that it works on them at once.
feedforward.mixed | mix experts | B T D | Σ weight · answer |
    Each token adds up the answers of its experts, by their weights.
feedforward.shared_gate | gate | B T 1 | x · Ws | How much of the shared expert's answer a token takes.
feedforward.with_shared | add the shared expert | B T D | mixed + {shared} |
    One expert works for every token, so that the others need not all learn the same.
feedforward.gate | gate | {rows} {F} | x · Wg{feedforward_bias}{gate_scale} |
    Which of the wide features will be let through.
feedforward.up | expand | {rows} {F} | x · Wu{feedforward_bias}{up_scale} |
    Each token by itself looks for many features, in a wider space.
feedforward.gate_clamped | clamp | {rows} {F} | min(gate, {clamp}) | Bounds the gate, so that none runs away.
feedforward.up_clamped | clamp | {rows} {F} | min(max(up, −{clamp}), {clamp}) |
    Bounds what the gate multiplies, so that none runs away.
feedforward.up_shifted | shift | {rows} {F} | up + {shift} |
    A feature that was not found still lets some of the gate through.
feedforward.activated | activate | {rows} {F} | {activation}(x) |
    The bend: without it the two linear maps would be one.
feedforward.out | nothing | B T D | 0 | This block has attention alone.
feedforward.gated | multiply | {rows} {F} | gate · up |
    The gate lets some features through and holds others back.
feedforward.down | contract | {rows} D | x · Wd{feedforward_bias} |
    The features found say what to add to the stream.
# Head
head.transform | transform | B T {W} | x · W{pooler_bias} |
    One more layer on each state before it is compared with the tokens.
head.activation | activate | B T {W} | {head_activation}(x) | The bend of that layer.
head.norm | norm | B T {W} | {norm}(x) | Brings the transformed states to one scale.
head.scaled | scale | B T {W} | x · {logit_scale} | Sets how sharp the choice will be.
head.up | expand | B T F | x · W + b | One more layer on each state, wide at first.
head.activated | activate | B T F | {head_activation}(x) | The bend of that layer.
head.down | contract | B T D | x · W + b | What that layer has to say of each state.
head.added | add | B T D | state + layer | It joins the state that it was made from.
head.pooled | pool | B D | {pooling} | One vector must speak for the whole input.
head.pooler | pooler | {vectors} | x · W{pooler_bias} | A layer before the scores.
head.bent | activate | {vectors} | {pooler}(x) | The bend of that layer.
head.pooler_norm | norm | {vectors} | {norm}(x) | Brings what it says to one scale.
head.normalised | unit length | B D | x / |x| | Vectors of length one are compared by their angle alone.
head.out | logits | {answers} | x · W{head_bias} | A score for every answer there is.
head.softcapped | soft-cap | B T V | {logit_softcap} · tanh(x / {logit_softcap}) |
    Bounds the scores smoothly, so that none runs away.
head.probabilities | probabilities | {answers} | {probability} | Scores become probabilities.
head.candidates | top candidates | {candidates} | the best {top} | What the model finds most likely.
"""
)

_PLACE = re.compile(r"^(?:encoder\.)?(?:blocks\.\d+\.)?")
_INNER = re.compile(r"^feedforward\.(?:experts|shared)\.")
_SUBLAYER = re.compile(r"^(?:attention|cross|feedforward)_residual\.")


def words_of(name: str, shape: tuple[int, ...], own_words: Mapping[str, Words]) -> Words:
    """Return the words of a step: those of "residual.add" for "blocks.3.attention_residual.add".

    `own_words` are those of its kind of attention; they go before the usual ones.
    """
    key = _INNER.sub("feedforward.", _SUBLAYER.sub("residual.", _PLACE.sub("", name)))
    key = key.partition(".")[0] if key.startswith(("mask.", "counts.")) else key
    title = key.rpartition(".")[2].replace("_", " ")
    own = Words(title, " ".join(map(str, shape)), title, f"A step of {key.rpartition('.')[0]} in this model.")
    return own_words.get(key) or WORDS.get(key) or WORDS.get(key.replace("cross.", "attention."), own)


# Kinds of attention -----------------------------------------------------------------------------------------


KIND_WORDS = {
    "global": _table(
        """
attention.q_global | global query | B T H·E | x · Wq'{qkv_bias} |
    What global tokens look for: those that see all others.
attention.k_global | global key | B S K·E | x · Wk'{key_bias} |
    What each token offers to be found by global ones.
attention.v_global | global value | B S K·{Ev} | x · Wv'{qkv_bias} |
    What each token hands over to global ones.
"""
    ),
    "linear": _table(
        """
attention.pattern | shares | B H T S | φ(q) · φ(k) / their sum |
    How much each token takes from each other one. The layer itself adds up values without them.
"""
    ),
    "low-rank": _table(
        """
attention.k_mix | mix keys | {shape} | Mᵀ · k |
    A few mixtures stand for all keys, by weights for each position.
attention.v_mix | mix values | {shape} | Mᵀ · v | The same mixtures of values, with weights of their own.
attention.scores | scores | {shape} | q · kᵀ | How well each query fits each mixture.
attention.scaled | scale | {shape} | scores · {scale} |
    Long vectors make large dot products; the scale keeps softmax from choosing one mixture alone.
attention.masked | mask | {shape} | {hidden} | Every mixture may be seen: nothing is hidden.
attention.pattern | softmax | {shape} | softmax(scores) |
    Scores become shares: how much each token takes from each mixture, one in all.
"""
    ),
    "gated-delta": _table(
        """
attention.q_projected | query, projected | B T Kd·Ed | x · Wq | One linear map of each token.
attention.k_projected | key, projected | B T Kd·Ed | x · Wk | One linear map of each token.
attention.v_projected | value, projected | B T Hd·Vd | x · Wv | One linear map of each token.
attention.conv | convolve | B T Cd | silu(conv(q, k, v)) | Each token takes in the few before it.
attention.q | query | B Kd T Ed | q / |q| | What each token looks for in the memory.
attention.k | key | B Kd T Ed | k / |k| | The place in the memory that each token writes to.
attention.v | value | B Hd T Vd | B T Hd·Vd → B Hd T Vd | What each token writes there.
attention.beta | strength | B Hd T | sigmoid(x · Wb) | How far each token replaces what stands at its place.
attention.decay | decay | B Hd T | −rate · softplus(x · Wa + b) |
    How much of the memory each token forgets first, as a logarithm.
attention.z | recall | B Hd T Vd | memory · q |
    Each token reads the memory, after it has forgotten and written.
attention.gate | gate | B T Hd·Vd | x · Wg | How much of what was read each token will let through.
attention.concat | norm and gate | B T Hd·Vd | rmsnorm(z) · silu(gate) |
    What the heads read is brought to one scale, gated, and laid side by side.
attention.out | output | B T D | x · Wo | Mixes what the heads read, and brings it to the width of the stream.
"""
    ),
    "mamba2": _table(
        """
attention.v_projected | value, projected | B T Hd·Vd | x · Wx{own_bias} | One linear map of each token.
attention.k_projected | key, projected | B T Kd·Ed | x · Wb{own_bias} | One linear map of each token.
attention.q_projected | query, projected | B T Kd·Ed | x · Wc{own_bias} | One linear map of each token.
attention.conv | convolve | B T Cd | silu(conv(v, k, q)) | Each token takes in the few before it.
attention.q | query | B Kd T Ed | B T Kd·Ed → B Kd T Ed |
    What each token looks for in the memory. The paper's C.
attention.k | key | B Kd T Ed | B T Kd·Ed → B Kd T Ed |
    The place in the memory that each token writes to. The paper's B.
attention.v | value | B Hd T Vd | B T Hd·Vd → B Hd T Vd | What each token writes there. The paper's x.
attention.dt | step | B Hd T | softplus(x · Wdt + b) |
    How strongly each token writes, and how far it makes the memory fade.
attention.decay | decay | B Hd T | −rate · step |
    How much of the memory each token forgets first, as a logarithm.
attention.z | recall | B Hd T Vd | memory · q + d · v |
    Each token reads the memory, after it has faded and been written, and adds its own value.
attention.gate | gate | B T Hd·Vd | x · Wz{own_bias} | How much of what was read each token will let through.
attention.concat | gate and norm | B T Hd·Vd | rmsnorm(z · silu(gate)) |
    What the heads read is laid side by side, gated, and brought to one scale.
attention.out | output | B T D | x · Wo{own_bias} |
    Mixes what the heads read, and brings it to the width of the stream.
"""
    ),
    "conv": _table(
        """
attention.k | input gate | B 1 T D | x · Wb{own_bias} | How much of its value each token hands on.
attention.q | output gate | B 1 T D | x · Wc{own_bias} |
    How much of what the convolution gives each token takes.
attention.v | value | B 1 T D | x · Wx{own_bias} | What each token hands on.
attention.gated | gate | B T D | input gate · value | What goes into the convolution.
attention.conv | convolve | B T D | conv(x) | Each token takes in the few before it.
attention.z | gate | B 1 T D | output gate · x | What comes out of the convolution.
attention.out | output | B T D | x · Wo{own_bias} | One linear map of each token.
"""
    ),
    "none": _table(
        """
attention.out | nothing | B T D | 0 | This block has a feed-forward alone.
"""
    ),
    "latent": _table(
        """
attention.q_down | latent of queries | B T Cq | x · Wdq{qkv_bias} |
    A narrow vector that the queries of all heads are made of.
attention.q_down_norm | norm | B T Cq | rmsnorm(x) | Brings the latent to one scale.
attention.q | query | B T H·E | x · Wq | What each token looks for.
attention.kv_down | latent | B T Cl | x · Wd{qkv_bias} |
    A narrow vector that keys and values of all heads are made of.
attention.kv_down_norm | norm | B T Cl | rmsnorm(x) |
    Brings the latent to one scale. A cache keeps it in place of keys and values.
attention.k_shared | shared key | B T R | x · Wr{key_bias} |
    Columns of the key that all heads share. They alone rotate, so that latents need not.
attention.q_rotated | rotate q | B H T E | the last R columns of q rotated by the position |
    Rotated queries and keys fit by their distance, so order enters the scores.
attention.k_rotated | rotate the shared key | B 1 T R | k rotated by its position |
    Rotated queries and keys fit by their distance. A cache keeps it next to the latent.
attention.k | key | B H T E | [latent · Wk; shared key] | What each token offers to be found by.
attention.v | value | B H T {Ev} | latent · Wv | What each token hands over when it is found.
"""
    ),
}
KIND_WORDS["hybrid"] = {
    **{name.replace("attention.", "attention.mixer."): words for name, words in KIND_WORDS["mamba2"].items()},
    **_table(
        """
attention.attended | attended | B T D | x · Wo{out_bias} | Mixes what the heads of attention found.
attention.mixed | mixed | B T D | mixer(x) | What the state-space layer makes of the same input.
attention.out | add | B T D | {attention_out} · attended + mixed | Both write to the stream together.
"""
    ),
}


def own_words(config: ModelConfig, name: str) -> Mapping[str, Words]:
    """Return the words for the kind of attention that a step belongs to; none where the usual ones hold."""
    layer = re.match(r"(?:encoder\.)?blocks\.(\d+)\.attention\.", name)
    spec = config.stacks[0] if name.startswith("encoder.") else config.main
    return KIND_WORDS.get(spec.kinds[int(layer[1])].name, {}) if layer else {}


# Facts that fill in the words -------------------------------------------------------------------------------


ANSWERS = {"lm": "B T V", "mlm": "B T V", "classifier": "B C"}  # shape of the logits; other heads: B T C
POOLING = {"cls": "the first token's state", "mean": "mean over tokens", "last": "the last token's state"}
BUCKET = "table[bucket of distance]"
BIAS_FORMULAS = {"alibi": "−slope · distance", "relative": BUCKET, "learned+relative": BUCKET}


def filled_words(config: ModelConfig, name: str, x: Tensor, **facts: Any) -> Words:
    """Return title, shape, formula and reason of a step, filled in for this model; `facts` fill in more."""
    words = words_of(name, tuple(x.shape), own_words(config, name))
    known = {**facts_of(config, name, x), **facts}
    return words._replace(
        **{part: getattr(words, part).format_map(known) for part in ("title", "symbols", "formula")}
    )


def facts_of(config: ModelConfig, name: str, x: Tensor) -> dict[str, Any]:
    """Return the values that fill in the formula and the symbols of a step."""
    spec = config.stacks[0] if name.startswith("encoder.") else config.main
    window = name.rpartition("mask.")[2] if "mask." in name else spec.windows[0]
    nearer = "" if window in (None, "full") else f", nearer than {window}"
    masks = name.endswith(".masked") and x.is_floating_point() and x.numel()
    hides = masks and float(x.min()) == torch.finfo(x.dtype).min
    inner = "Fx" if ".experts." in name and spec.d_expert != spec.d_ff else "F"
    scores = "sigmoid(each)" if config.router_order == "sigmoid_topk" else "softmax(all)"
    weighed = f"{scores}, the chosen" + (" / their sum" if config.router_renormalise else "")
    weighed = "softmax(the chosen)" if config.router_order == "topk_softmax" else weighed
    groups = f" in the best {config.n_active_groups} of {config.router_groups} groups"
    layer = re.match(r"(?:encoder\.)?blocks\.(\d+)\.", name)
    of_tokens = ".front." in name or name.startswith("head.")  # as wide as their table
    return {
        "W": "D" if (spec.d_embedding if of_tokens else spec.d_summed) == spec.d_model else "W",
        "front_bias": "" if spec.project_tokens else " + b",
        "N": "N" if spec.input == "patches" else "T",
        "Ev": "E" if spec.d_value == spec.d_head else "Ev",
        "Tin": "Tin" if spec.input == "frames" else "T",
        "rows": "B·T·A" if ".experts." in name else "B T",
        "F": "Fs" if ".shared." in name else inner,
        "z": "gate" if config.attention_gate or config.head_gate else "mix values",
        "z_formula": "mixed · sigmoid(gate)" if config.attention_gate or config.head_gate else "pattern · v",
        "gate": "B T H" if config.head_gate else "B T H·Ev" if spec.d_value != spec.d_head else "B T H·E",
        "gate_of": f"x[:{config.head_gate}]" if config.head_gate else "x",
        "q_normed": "B T H·E" if spec.qk_norm == "full" else "B H T E",
        "k_normed": "B S K·E" if spec.qk_norm == "full" else "B K S E",
        "bias": BIAS_FORMULAS.get(spec.positions, "a function of the distance"),
        "mask": ("earlier" if spec.causal else "all") + nearer,
        "scale": f"{spec.attention_scale:.4g}",
        "hidden": "lowest number where hidden" if hides else "nothing is hidden",
        "norm": config.norm,
        "activation": config.activation,
        "head_activation": config.head_activation,
        "embedding_scale": f"{config.embedding_scale:.4g}",
        "residual_scale": f"{config.residual_scale:.4g}",
        "logit_scale": f"{config.logit_scale:.4g}",
        "softcap": config.attention_softcap,
        "logit_softcap": config.logit_softcap,
        "own_bias": " + b" if layer and getattr(spec.kinds[int(layer[1])], "bias", False) else "",
        "attention_out": f"{getattr(spec.kinds[int(layer[1])], 'attention_out', 1.0) if layer else 1.0:.4g}",
        "qkv_bias": " + b" if config.qkv_bias else "",
        "key_bias": " + b" if config.key_bias else "",
        "out_bias": " + b" if config.attention_out_bias else "",
        "feedforward_bias": " + b" if config.feedforward_bias else "",
        "head_bias": " + b" if config.head_bias else "",
        "clamp": config.gated_clamp,
        "shift": f"{config.gated_shift:.4g}",
        "gate_scale": f", · {config.gate_scale:.4g}" if config.gate_scale != 1 else "",
        "up_scale": f", · {config.up_scale:.4g}" if config.up_scale != 1 else "",
        "router_bias": " + b" if config.router_bias else "",
        "among": f"{config.n_experts}{groups if config.router_groups > 1 else ''}",
        "n_active": config.n_active_experts,
        "router": weighed if config.router_scale == 1 else f"{weighed}, · {config.router_scale:.4g}",
        "shared": "sigmoid(gate) · answer" if config.shared_expert_gate else "answer",
        "pooling": POOLING[config.readout.pooling],
        "pooler": config.pooler,
        "pooler_bias": " + b" if config.pooler_bias else "",
        "vectors": "B T D" if config.head in ("tagger", "span") else "B D",
        "answers": ANSWERS.get(config.readout.head, "B T C"),
        "shape": " ".join(map(str, x.shape)),
    }
