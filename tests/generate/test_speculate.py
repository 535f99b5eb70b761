"""Speculation changes how fast tokens come, never which: the same tokens, or the same distribution."""

from __future__ import annotations

import itertools

import pytest
import torch

import clearhead as ch
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Drafter, Prompts, Proposal, accept, adjust, distribution, draw
from clearhead.run.generate.speculate import DraftModel, PromptLookup
from tests.harness import build
from tests.later import later

stats = later("scipy.stats")

SHAPES = {
    "learned": {"positions": "learned"},
    "rope, grouped": {"positions": "rope", "n_kv_heads": 2, "norm": "rmsnorm", "gated": True},
    "windows": {"positions": "rope", "window": (4, None)},
    "alibi": {"positions": "alibi"},
    "two stacks": {"family": "encoder-decoder", "positions": "relative"},
}
OPTIONS = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.3, "no_repeat_ngram": 3},
    "greedy, biases": {"logit_bias": {3: 1.5, 7: -100.0, 5: -2.0}},
    "plain": {"temperature": 1.0},
    "biases": {"temperature": 0.9, "logit_bias": {3: 1.5, 7: -100.0, 5: -2.0}},
    "top-k, top-p": {"temperature": 0.8, "top_k": 8, "top_p": 0.9},
    "min-p, typical": {"temperature": 1.2, "min_p": 0.02, "typical_p": 0.9},
    "penalties": dict(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, banned=(2,)
    ),
}


def loaded(shape: str, seed: int = 0, **changes) -> ch.Model:
    return ch.Model(
        build(seed, **{"max_positions": 96, **SHAPES[shape], **changes}),
        special={"decoder_start": 1, "eos": 5},
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(13, (length,), generator=generator).tolist() for length in (1, 2, 9, 24)[:count]]


@pytest.mark.ledger("G6")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, name) for shape in SHAPES for name in ("greedy", "top-k, top-p")),
        *(("learned", name) for name in OPTIONS if name not in ("greedy", "top-k, top-p")),
    ],
)
def test_lookup_gives_the_same_tokens(shape, options):
    """Token for token, with log-probabilities, alternatives and stop reasons, in fewer runs of the model."""
    runs = tokens = 0
    for seed in range(2 if options == "greedy" else 1):
        m = loaded(shape, seed)
        wanted = m.generate(prompts(4), 60, seed=seed, logprobs=True, alternatives=2, **OPTIONS[options])
        made = m.generate(
            prompts(4), 60, seed=seed, logprobs=True, alternatives=2, lookup=5, **OPTIONS[options]
        )
        for one, other in zip(made, wanted):
            assert (one.ids, one.stop_reason) == (other.ids, other.stop_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert [[token for token, _ in best] for best in one.alternatives] == [
                [t for t, _ in best] for best in other.alternatives
            ]
            assert other.steps == len(other.ids) + (other.stop_reason == "eos")
            assert one.steps <= other.steps
            runs, tokens = runs + one.steps, tokens + other.steps
    if options == "greedy":
        assert runs < 0.8 * tokens  # random models go in circles


@pytest.mark.ledger("G6")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, "greedy") for shape in SHAPES),
        *(("learned", f"greedy, {more}") for more in ("penalties", "biases")),
    ],
)
def test_a_draft_gives_the_same_greedy_tokens(shape, options):
    m = loaded(shape)
    near = loaded(shape)
    with torch.no_grad():
        for parameter in near.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    wanted = m.generate(prompts(3), 24, **OPTIONS[options])
    for draft in (m, near, loaded(shape, seed=7, n_layers=1, window=None)):
        made = m.generate(prompts(3), 24, draft=draft, draft_tokens=3, **OPTIONS[options])
        assert [(row.ids, row.stop_reason) for row in made] == [(row.ids, row.stop_reason) for row in wanted]
        if draft is m and options == "greedy":  # all guesses come true: four tokens a run
            assert all(row.steps <= -(-(len(row.ids) + 1) // 4) for row in made)


@pytest.mark.ledger("G6")
@pytest.mark.parametrize("options", ["plain", "top-k, top-p", "min-p, typical"])
@pytest.mark.cpu
def test_accepted_and_replaced_guesses_follow_p(options):
    """A chi-squared test of 200,000 draws; the same test finds fault with rules that are nearly right."""
    n, generator = 200_000, torch.Generator().manual_seed(1)
    sampling = Request(**OPTIONS[options])
    logits = torch.randn(2, 12, generator=generator) * 1.5
    logits[1] = logits[0] + 0.7 * logits[1]
    p, q = distribution(adjust(logits, sampling), sampling)
    uniform, spare, first = torch.rand(3, n, generator=generator, dtype=torch.float64)
    many_p, many_q = p.expand(n, -1), q.expand(n, -1)
    guessed = draw(many_q, first)
    chosen, kept = accept(many_p, many_q, guessed, uniform, spare)
    assert fits(chosen, p)
    assert abs(kept.double().mean() - torch.minimum(p, q).sum()) < 0.006  # as many are kept as can be
    assert not fits(guessed, p)
    # Here guesses are replaced from p, not from what is left of it.
    assert not fits(torch.where(kept, guessed, draw(many_p, spare)), p)
    again = uniform < p.gather(0, guessed)  # kept with probability p, not p / q
    assert not fits(torch.where(again, guessed, draw((many_p - many_q).clamp(min=0), spare)), p)


def fits(tokens: torch.Tensor, exact: torch.Tensor) -> bool:
    """Do these draws follow this distribution, at odds of one in a million of saying no by chance?"""
    counts, expected = tokens.bincount(minlength=len(exact)).double(), exact * len(tokens)
    possible = exact > 0
    if counts[~possible].sum():
        return False
    return stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-6


class Fixed(Drafter):
    """Guesses by a fixed distribution, whatever has been said."""

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q

    def propose(self, tokens, most, roll):
        drawn = [int(draw(self.q, roll())) for _ in range(min(2, most))]
        return Proposal(drawn, [self.q] * len(drawn))


class Bigrams(torch.nn.Module):
    """A model quick enough to be asked thousands of times: logits depend on the last token alone."""

    config = build(vocab_size=6).config

    def __init__(self, seed):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))

    def forward(self, ids, mask=None, source=None, source_mask=None, cache=None, logits="all"):
        cache.length += ids.shape[1]
        said = self.table[ids]
        return ch.Output(said[:, -1:] if logits == "last" else said, said)


@pytest.mark.ledger("G6")
@pytest.mark.parametrize("kind", ["draft", "fixed"])
@pytest.mark.cpu
@pytest.mark.slow
def test_two_tokens_follow_their_exact_distribution(kind, monkeypatch):
    """From end to end: 1,500 pairs of tokens, against the product of the two conditional distributions."""
    sampling = Request(max_new_tokens=3, temperature=1.1, repetition_penalty=1.4)
    model, draft, prompt = Bigrams(3), Bigrams(4), [1, 4, 2, 1, 4]
    q = torch.tensor([[0.3, 0.1, 0.2, 0.1, 0.1, 0.2]], dtype=torch.float64)

    def next_of(tokens):
        return distribution(
            adjust(model.table[tokens[-1:]].detach(), sampling, [tokens], [len(prompt)]), sampling
        )[0]

    first = next_of(prompt)
    exact = torch.stack([first[token] * next_of([*prompt, token]) for token in range(6)]).flatten()

    def pairs(count):
        read = Prompts([prompt] * count, seeds=range(count))
        drafters = [
            DraftModel(draft, 2, sampling, read) if kind == "draft" else Fixed(q) for _ in range(count)
        ]
        rows = decode(model, sampling, read, drafters=drafters)
        return torch.tensor([6 * row.ids[0] + row.ids[1] for row in rows])

    assert fits(pairs(1_500), exact)
    monkeypatch.setattr(
        "clearhead.run.generate.sequence.accept", lambda p, q, guessed, *_: (guessed, torch.tensor([True]))
    )
    assert not fits(pairs(500), exact)  # every guess kept


def test_lookup_guesses_what_came_before():
    def none():
        raise AssertionError("a lookup draws nothing")

    lookup = PromptLookup(4)
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2, 3], 10, none).tokens == [4, 9, 1, 2]
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2, 3, 7, 7], 10, none).tokens == []
    # Past its end it goes on with itself.
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2, 3, 7, 7, 7], 3, none).tokens == [7, 7, 7]
    assert PromptLookup(2, before=[5, 6, 7, 8]).propose([5, 6], 10, none).tokens == [7, 8]


@pytest.mark.ledger("G6")
def test_a_source_is_looked_into():
    """A decoder that says the tokens of the source one after the other: all but the first few are guessed."""
    source = [3, 7, 4, 8, 9, 10, 11, 6, 2, 12]
    m = loaded("two stacks", tie_embeddings=False)
    with torch.no_grad():
        for name, parameter in m.model.decoder.named_parameters():
            if name.endswith(("out.weight", "down.weight", "bias")):
                parameter.zero_()  # nothing is added to what a token is
        m.model.decoder.embedding.front.tokens.weight.copy_(torch.eye(13, 16))
        m.model.decoder.norm.weight.fill_(1.0)
        m.model.head.out.weight.zero_()
        for last, following in itertools.pairwise([1, *source]):
            m.model.head.out.weight[following, last] = 9.0
    plain, made = m.generate(source, 9), m.generate(source, 9, lookup=6)
    assert made.ids == plain.ids == source[:9]
    assert made.steps <= 4 < plain.steps


def test_cancelled_streamed_and_stopped_alike(byte_tokenizer):
    m = ch.Model(build(vocab_size=256, positions="rope", max_positions=256), byte_tokenizer)
    seen: dict[int, str] = {}

    def add(number, new):
        seen[number] = seen.get(number, "") + new

    for stop in ((), ("é", "q")):
        seen.clear()
        made = m.generate(["hello", "日本"], 40, temperature=0.7, stop=stop, lookup=4, on_text=add)
        plain = m.generate(["hello", "日本"], 40, temperature=0.7, stop=stop)
        assert [(row.text, row.ids, row.stop_reason) for row in made] == [
            (row.text, row.ids, row.stop_reason) for row in plain
        ]
        assert [seen.get(0, ""), seen.get(1, "")] == [row.text for row in plain]
    calls = itertools.count()
    made = m.generate(["hello", "you"], 40, lookup=4, cancel=lambda: next(calls) >= 3)
    assert [row.stop_reason for row in made] == ["cancelled", "cancelled"]
    assert [row.ids for row in made] == [
        row.ids[: len(cut.ids)] for row, cut in zip(m.generate(["hello", "you"], 40), made)
    ]
    assert m.generate("hello", 40, lookup=4, seconds=0.0).stop_reason == "time"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lookup": -1}, "lookup -1"),
        ({"lookup": 2.5}, "lookup 2.5"),
        ({"draft": "rope, grouped", "draft_tokens": 0}, "draft_tokens 0"),
        ({"draft": "rope, grouped", "lookup": 4}, "lookup with draft"),
        ({"draft": "two stacks"}, "family"),
        ({"draft": "larger"}, "vocab_size is 14 and the model's 13"),
    ],
)
def test_mistakes_are_one_line(options, words):
    if "draft" in options:
        name = options["draft"]
        options = options | {"draft": loaded("learned", vocab_size=14) if name == "larger" else loaded(name)}
    with pytest.raises(ch.InputError, match=words) as error:
        loaded("learned").generate([1, 2], 4, **options)
    assert "\n" not in str(error.value)


def test_angles_that_go_by_length_are_refused():
    scaling = ch.RopeScaling(kind="dynamic", factor=2.0)
    m = ch.Model(build(positions="rope", rope_scaling=scaling))
    with pytest.raises(ch.InputError, match="leave lookup and draft out"):
        m.generate([1, 2], 4, lookup=2)
