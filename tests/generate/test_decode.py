"""The decode loop: batched = alone, cached = recomputed, streamed = not streamed, token for token."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import clearhead as ch
from clearhead.core.embedding import Embedding
from clearhead.run.generate.decode import PREFILL_CHUNK, cache_for, decode, greedy
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import (
    LENGTH_ALONE,
    Dice,
    Ends,
    Prompts,
    Sequence,
    adjust,
    distribution,
    draw,
)
from tests.harness import build, scramble

V = 64
TINY = {"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "max_positions": 128}
LLAMA = {"positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False}
SHAPES = {
    "gpt2": {"positions": "learned", "activation": "gelu_tanh"},
    "llama": {**LLAMA, "n_kv_heads": 2},
    "gemma2": {
        **LLAMA,
        "n_kv_heads": 2,
        "norm_position": "sandwich",
        "window": (8, None),
        "attention_softcap": 20.0,
        "logit_softcap": 10.0,
    },
    "t5": dict(
        family="encoder-decoder", positions="relative", norm="rmsnorm", attention_scale=1.0, bias=False
    ),
    "bart": {"family": "encoder-decoder", "positions": "learned", "norm_position": "post"},
}
WAYS = dict(greedy=Request(), sampled=Request(temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.1))
LENGTHS = (1, 2, 5, 13, 27, 40)
START, STOP = 3, 17

every_shape = pytest.mark.parametrize("shape", SHAPES)
every_way = pytest.mark.parametrize("way", WAYS)


def model_of(shape: str) -> ch.Transformer:
    return scramble(ch.Transformer(ch.ModelConfig(**{**TINY, **SHAPES[shape]})), seed=1).eval()


def prompts_of(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]


def decoded(model, prompts, count, ends=LENGTH_ALONE, cache=None, **options) -> list[Sequence]:
    """`decode`, by what its request and prompts are made of."""
    return decode(model, Request(max_new_tokens=count, **options), Prompts(prompts), ends, cache)


def recomputed(
    model: ch.Transformer, prompt: list[int], count: int, sampling: Request, seed: int
) -> list[int]:
    """One row, without a cache: the whole row through the model for every token."""
    dice = Dice(seed)
    both = model.encoder is not None
    fed = [START] if both else prompt
    more = {"source": torch.tensor([prompt])} if both else {}
    ids: list[int] = []
    while len(ids) < count:
        with torch.no_grad():
            logits = model(torch.tensor([fed + ids]), **more).logits[:, -1]
        adjusted = adjust(logits, sampling, [fed + ids], [len(fed)])
        uniform = torch.tensor([dice.roll() if sampling.temperature else 0.0], dtype=torch.float64)
        token = int(draw(distribution(adjusted, sampling), uniform))
        if token == STOP:
            break
        ids.append(token)
    return ids


@pytest.mark.ledger("G2", "G3", "G4")
@every_way
@every_shape
def test_batched_alone_cached_recomputed_and_streamed(shape, way, byte_tokenizer):
    model, prompts, sampling, count = model_of(shape), prompts_of(), WAYS[way], 24
    wanted = [recomputed(model, prompt, count, sampling, seed=4) for prompt in prompts]
    m = ch.Model(model, byte_tokenizer, special={"eos": STOP, "decoder_start": START})
    options = {
        name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")
    } | {"seed": 4}
    together = m.generate(prompts, count, **options)
    assert [made.ids for made in together] == wanted
    assert [made.stop_reason for made in together] == [
        "length" if len(ids) == count else "eos" for ids in wanted
    ]
    seen = dict.fromkeys(range(len(prompts)), "")
    streamed = m.generate(
        prompts, count, on_text=lambda number, new: seen.update({number: seen[number] + new}), **options
    )
    assert [made.ids for made in streamed] == wanted
    assert list(seen.values()) == [made.text for made in streamed] == [made.text for made in together]
    for prompt, ids in zip(prompts[::2], wanted[::2]):
        assert m.generate(prompt, count, **options).ids == ids


@pytest.mark.ledger("G3")
@pytest.mark.parametrize("side", ["left", "right"])
@every_shape
def test_tensors_may_be_padded_on_either_side(shape, side):
    model, prompts, count = model_of(shape), prompts_of((1, 6, 11)), 16
    ids, mask = torch.randint(V, (3, 11)), torch.zeros(3, 11, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        place = slice(11 - len(prompt), 11) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), True
    if model.encoder is not None:
        made = greedy(model, torch.full((3, 1), START), count, source=ids, source_mask=mask, stop=STOP)
    else:
        made = greedy(model, ids, count, mask, stop=STOP)
    for row, prompt in zip(made.tolist(), prompts):
        wanted = recomputed(model, prompt, count, Request(), seed=0)
        assert row == (wanted + [STOP] * count)[: made.shape[1]]


# Windows ----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("G2")
@pytest.mark.parametrize("window", [6, (6, None), (6, 10)])
def test_windows_bound_what_is_kept(window):
    """A ring in each layer with a window, no larger however long the row; tokens as with everything kept."""
    model = scramble(ch.Transformer(ch.ModelConfig(**{**TINY, **LLAMA, "window": window})), seed=2).eval()
    cache = cache_for(model, 13)
    assert isinstance(cache, ch.WindowCache)
    assert type(cache_for(model, 12)) is ch.Cache  # nothing to gain
    prompts = prompts_of((1, 9, 30))
    assert [row.ids for row in decoded(model, prompts, 40)] == [
        recomputed_rows(model, prompt, 40) for prompt in prompts
    ]
    decoded(model, prompts[:1], 90, cache=cache)
    windows = model.config.decoder.windows
    for layer, keys in cache.layers.items():
        assert windows[layer] is None or keys.k.shape[2] == windows[layer] + 1


def recomputed_rows(model: ch.Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy, with a cache that forgets nothing."""
    cache, ids = ch.Cache(), list(prompt)
    while len(ids) < len(prompt) + count:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[cache.length :]]), cache=cache).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# A prompt in pieces, a step of one's own --------------------------------------------------------------------


@pytest.mark.ledger("G2")
def test_a_long_prompt_is_read_in_pieces():
    model = scramble(ch.Transformer(ch.ModelConfig(**{**TINY, **LLAMA, "window": (8, None)})), seed=1).eval()
    prompts = prompts_of((PREFILL_CHUNK + 70, 3))
    for row in decoded(model, prompts, 4):
        assert row.ids == recomputed(model, row.prompt, 4, Request(), seed=0)


# Cancelling, stopping, overflowing --------------------------------------------------------------------------


@pytest.mark.ledger("G4")
def test_cancelling_keeps_what_has_come(byte_tokenizer):
    m = ch.Model(model_of("llama"), byte_tokenizer)
    whole = m.generate(prompts_of((3, 8)), 40)
    event, seen = threading.Event(), []

    def watch(number, new):
        seen.append(new)
        if len(seen) == 7:
            event.set()

    made = m.generate(prompts_of((3, 8)), 40, on_text=watch, cancel=event)
    for one, all_of_it in zip(made, whole):
        assert one.stop_reason == "cancelled"
        assert 0 < len(one.ids) < 40
        assert one.ids == all_of_it.ids[: len(one.ids)]
        assert all_of_it.text.startswith(one.text.rstrip("\ufffd"))
    assert m.generate([1, 2], 40, cancel=lambda: True).steps == 1
    assert m.generate([1, 2], 40, cancel=threading.Event()).stop_reason == "length"


@pytest.mark.ledger("G4")
def test_tokens_that_stop(byte_tokenizer):
    byte_tokenizer = type(byte_tokenizer).from_str(byte_tokenizer.to_str())
    m = ch.Model(model_of("llama"), byte_tokenizer)
    whole = m.generate([1, 2, 3], 30)
    place = next(i for i, token in enumerate(whole.ids) if token not in whole.ids[:i] and i > 2)
    token = whole.ids[place]
    for stop in (token, byte_tokenizer.id_to_token(token)):
        made = m.generate([1, 2, 3], 30, stop_tokens=[stop])
        assert (made.ids, made.stop_reason) == (whole.ids[:place], "eos")
    byte_tokenizer.add_special_tokens(["<|end|>"])
    for stop, words in (
        (V, "63"),
        (-1, "-1"),
        ("<|emd|>", 'did you mean "<|end|>"'),
        ("<|end|>", "vocabulary"),
    ):
        with pytest.raises(ch.InputError, match=words.replace("|", r"\|").replace("?", r"\?")) as error:
            m.generate([1], 4, stop_tokens=[stop])
        assert "\n" not in str(error.value)
    with pytest.raises(ch.InputError, match="stop_ids"):
        decoded(m.model, [[1]], 4, Ends(frozenset([V])))
    # Of the checkpoint's own stops, those that cannot come are no reason to refuse.
    m.special = {"eos": V + 5}
    assert m.generate([1, 2, 3], 30).ids == whole.ids


@pytest.mark.parametrize("shape", ["gpt2", "llama", "bart"])
def test_a_prompt_too_long_is_refused_or_cut(shape):
    m = ch.Model(model_of(shape), special={"decoder_start": START})
    (prompt,) = prompts_of((150,))
    kept = 128 if shape == "bart" else 128 - 9
    assert m.generate(prompt, 10, overflow="window").ids == m.generate(prompt[-kept:], 10).ids
    assert m.generate(prompt[:5], 10, overflow="window").ids == m.generate(prompt[:5], 10).ids
    if shape != "llama":
        with pytest.raises(ch.InputError, match="positions"):
            m.generate(prompt, 10)
    with pytest.raises(ch.InputError, match="overflow 'wrap' is not allowed"):
        m.generate(prompt, 10, overflow="wrap")
    if shape != "bart":
        with pytest.raises(ch.InputError, match="no room"):
            m.generate(prompt, 200, overflow="window")


# Reading what was read before no second time ----------------------------------------------------------------


class Counting:
    """Counts the tokens that go through a model."""

    def __init__(self, monkeypatch) -> None:
        self.tokens, forward = 0, Embedding.forward

        def counted(embedding, ids, *args, **more):
            self.tokens += ids.shape[1]
            return forward(embedding, ids, *args, **more)

        monkeypatch.setattr(Embedding, "forward", counted)

    def of(self, call) -> int:
        before = self.tokens
        call()
        return self.tokens - before


@pytest.mark.ledger("G2")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"lookup": 4}], ids=str)
@pytest.mark.parametrize("shape", ["gpt2", "llama", "gemma2"])
def test_a_common_beginning_is_read_once(shape, options, monkeypatch):
    counting = Counting(monkeypatch)
    m, (prompt, other) = ch.Model(model_of(shape)), prompts_of((40, 30))
    fresh = ch.Model(m.model)
    first = m.generate(prompt, 10, reuse=True, **options)
    assert first.ids == fresh.generate(prompt, 10, **options).ids
    longer = prompt + first.ids + [1, 2, 3]  # a conversation goes on
    made: list[ch.Generation] = []
    read = counting.of(lambda: made.append(m.generate(longer, 10, reuse=True, **options)))
    assert made[0].ids == fresh.generate(longer, 10, **options).ids
    # Read what is new, and the last token said.
    assert read < len(longer) if "lookup" in options else read == 4 + 9
    # Ask for the same, for a shorter one, and for other ways to go on.
    for again in (longer, prompt[:20], [*prompt[:20], *other], other, [prompt[0]]):
        assert m.generate(again, 10, reuse=True, **options).ids == fresh.generate(again, 10, **options).ids
    if not options:
        # Of the last prompt, one token is the same.
        assert counting.of(lambda: m.generate(prompt, 1, reuse=True)) == 39
        assert counting.of(lambda: m.generate(prompt, 1, reuse=True)) == 1


@pytest.mark.ledger("G2")
def test_what_was_read_is_forgotten_when_weights_change(monkeypatch):
    counting = Counting(monkeypatch)
    m, (prompt,) = ch.Model(model_of("llama")), prompts_of((20,))
    m.generate(prompt, 5, reuse=True)
    with torch.no_grad():
        for parameter in m.model.parameters():
            parameter.mul_(1.5)
    wanted = decoded(m.model, [prompt], 5)[0].ids
    made: list[ch.Generation] = []
    assert counting.of(lambda: made.append(m.generate(prompt, 5, reuse=True))) == 24
    assert made[0].ids == wanted
    with ch.record(m.model, "blocks.0.resid_post") as seen:
        assert m.generate(prompt, 5, reuse=True).ids == wanted
    assert seen.calls("blocks.0.resid_post")[0].shape[1] == 20  # who watches sees all of it
    for bad in (
        lambda: m.generate([[1], [2]], 3, reuse=True),
        lambda: ch.Model(model_of("t5")).generate([1], 3, reuse=True),
    ):
        with pytest.raises(ch.InputError, match="one prompt of a decoder"):
            bad()


def test_a_limit_beyond_all_memory_reserves_none_of_it():
    model = ch.Transformer(ch.ModelConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, positions="rope"))
    rows = decoded(model, [[1, 2]], 10**12, Ends(cancel=lambda: True))
    assert [(len(row.ids), row.stop_reason) for row in rows] == [(1, "cancelled")]


@pytest.mark.parametrize("seed", range(4))
def test_longrope_is_the_forward_pass_on_both_sides_of_its_trained_length(seed):
    """Alone, in a batch whose longest row ends and takes the others back, and along the best of beams."""
    torch.manual_seed(seed)
    factors = {"short_factor": (1.0, 1.5, 2.0), "long_factor": (3.0, 9.0, 30.0), "original_positions": 12}
    scaling = ch.RopeScaling(kind="longrope", **factors)
    config = ch.preset("micro-decoder").replace(
        vocab_size=19, positions="rope", d_model=24, n_heads=4, rope_scaling=scaling, max_positions=64
    )
    model = ch.Transformer(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    m = ch.Model(model, special={"eos": 2})

    def best(rows: list[list[int]]) -> list[int]:
        """What each row goes on with, all of them read at once."""
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
        with torch.no_grad():
            return model(ids, mask).logits[:, -1].argmax(-1).tolist()

    prompts = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [12] * 9]
    rows, running = [list(prompt) for prompt in prompts], [0, 1, 2]
    for _ in range(20):
        for i, token in zip(list(running), best([rows[i] for i in running])):
            if token == 2:
                running.remove(i)
            else:
                rows[i].append(token)
        if not running:
            break
    made = m.generate(prompts, 20)
    assert [prompt + one.ids for prompt, one in zip(prompts, made)] == rows
    found = m.generate([5, 6, 7], 16, num_beams=3)
    text = [5, 6, 7, *found.ids, *([2] if found.stop_reason == "eos" else [])]
    with torch.no_grad():
        total = sum(
            float(model(torch.tensor([text[:end]])).logits[0, -1].log_softmax(-1)[text[end]])
            for end in range(3, len(text))
        )
    assert found.score == pytest.approx(total / (len(text) - 3), abs=1e-4)


@pytest.mark.filterwarnings("ignore:texts passed")
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_text_slides_past_the_positions(shape):
    """Each token is the best after the last `max_positions` tokens, for rows of any length."""
    model = model_of(shape)
    m, window = ch.Model(model), model.config.max_positions
    prompts = prompts_of((5, 150, window - 3))
    with pytest.warns(RuntimeWarning, match="positions") as said:
        made = m.generate(prompts, 12, overflow="slide")
    assert len(said) == 1
    assert made[0].ids == m.generate(prompts[0], 12).ids
    for prompt, row in zip(prompts, made):
        text = list(prompt[-window:])
        for token in row.ids:
            with torch.no_grad():
                assert token == model(torch.tensor([text[-window:]])).logits[0, -1].argmax()
            text.append(token)
        assert len(row.ids) == 12
    for options in ({"num_beams": 2}, {"lookup": 2}):
        with pytest.raises(ch.InputError, match=r"slide|anew"):
            m.generate(prompts[1], 12, overflow="slide", **options)
    drawn = m.generate(prompts[2], 40, overflow="slide", temperature=1.0)
    assert len(drawn.ids) == 40


def test_a_rotary_model_past_its_training_is_warned_of_once():
    m = ch.Model(model_of("llama"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            m.generate(prompts_of((126,))[0], 6)
        m.generate([1, 2], 6)
    assert [str(line.message)[:40] for line in said] == ["texts passed the 128 tokens of the model"]


# Generation with every kind of attention -------------------------------------------------------------------


KINDS = [
    "window(3, sinks=1)",
    "dilated(2, 2)",
    "strided(3)",
    "blocks(2, 1, 1, 0, 1)",
    "linear",
    "linear(favor, 16)",
    ("full", "gated-delta"),
    ("mamba2(d_state=5)", "full"),
    ("conv", "none"),
    ("latent(5, query_rank=7)", "full"),
]


def plainly(model: ch.Transformer, prompt: list[int], new: int) -> list[int]:
    """The best token after the whole text, again and again."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.cpu
@pytest.mark.ledger("J1", "J2", "M1")
@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_tokens_are_those_of_plain_passes(attention):
    m = ch.Model(build(attention=attention, positions="rope", rope_fraction=0.5, max_positions=64))
    first, second = [1, 2, 3], [4, 5, 6, 7, 8]
    expected = plainly(m.model, first, 12)
    assert m.generate(first, 12).ids == expected
    assert [row.ids for row in m.generate([first, second], 12)] == [expected, plainly(m.model, second, 12)]
    m.generate([1, 2, 3, 5], 4, reuse=True)
    assert m.generate(first, 12, reuse=True).ids == expected
    assert m.generate(first, 12, num_beams=1).ids == expected


@pytest.mark.cpu
@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_beams_are_those_of_every_continuation(attention):
    """As many beams as continuations of two tokens: the best of all of them is found."""
    m = ch.Model(build(attention=attention, positions="rope", rope_fraction=0.5, vocab_size=5))
    found = m.generate([1, 2, 3], 3, num_beams=25).ids
    scores = {}
    with torch.no_grad():
        for a in range(5):
            for b in range(5):
                logits = m.model(torch.tensor([[1, 2, 3, a, b]])).logits[0].log_softmax(-1)
                for c in range(5):
                    scores[a, b, c] = float(logits[2, a] + logits[3, b] + logits[4, c])
    assert tuple(found) == max(scores, key=scores.get)


@pytest.mark.cpu
def test_speculation_over_a_state_is_refused():
    m = ch.Model(build(attention=("full", "linear")))
    with pytest.raises(ch.InputError, match="cannot take a rejected token back"):
        m.generate([1, 2, 3], 4, lookup=2)
    with pytest.raises(ch.InputError, match="cannot take a rejected token back"):
        ch.Model(build()).generate([1, 2, 3], 4, draft=m)


@pytest.mark.cpu
@pytest.mark.parametrize("attention", ["linear", ("full", "gated-delta")], ids=str)
def test_pairs_of_tokens_are_refused_where_a_layer_has_no_scores_of_them(attention):
    model, ids = build(attention=attention), torch.tensor([[1, 2, 3]])
    kind = "linear" if attention == "linear" else "gated-delta"
    for name, given in (("bias", torch.zeros(1, 1, 3, 3)), ("prefix", torch.tensor([2]))):
        with pytest.raises(ch.InputError, match=f"{name} speaks of pairs of tokens, and attention {kind}"):
            model(ids, **{name: given})
