"""Beam search against exhaustive search, against transformers, and against itself."""

from __future__ import annotations

import collections
import functools
import itertools

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.run.generate.beam import beam_search
from clearhead.run.generate.decode import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts
from tests.parity import harness, seq2seq

EOS = 2
ENDS_AT_EOS = Ends(frozenset([EOS]))
ENDS = {"eos_token_id": EOS, "pad_token_id": 1, "bos_token_id": 0}
SIZE = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **ENDS}
SIZE |= {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 64}
GEMMA = {"head_dim": 4, "sliding_window": 5, "query_pre_attn_scalar": 4}
GPT2 = {"vocab_size": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, **ENDS}
T5 = {"vocab_size": 13, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, **ENDS}
BART = {
    **{"vocab_size": 13, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, **ENDS},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"max_position_embeddings": 64, "decoder_start_token_id": 3},
}
REFERENCES = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(**GPT2)),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**SIZE)),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config(**SIZE, **GEMMA)),
    "t5": ("T5ForConditionalGeneration", transformers.T5Config(**T5, decoder_start_token_id=3)),
    "bart": ("BartForConditionalGeneration", transformers.BartConfig(**BART)),
}


def model_of(family: str, seed: int = 0, vocab_size: int = 5) -> ch.Transformer:
    torch.manual_seed(seed)
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_positions": 64}
    return ch.Transformer(ch.ModelConfig(family=family, vocab_size=vocab_size, init_std=0.6, **shape)).eval()


def asked(family: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What the decoder begins with, and what else the model reads."""
    return ([1, 3, 4], {}) if family == "decoder" else ([1], {"source": torch.tensor([[3, 0, 4, 1]])})


@torch.inference_mode()
def log_probability(
    model: ch.Transformer, prompt: list[int], new: list[int], **source: torch.Tensor
) -> float:
    """Of `new` after a prompt, all in one pass."""
    ids = torch.tensor([[*prompt, *new]])
    values = model(ids[:, :-1], **source).logits[0, len(prompt) - 1 :].double().log_softmax(-1)
    return float(values.gather(-1, ids[0, len(prompt) :, None]).sum())


@functools.cache
def exhaustive(family: str, length: int = 4) -> list[tuple[float, list[int]]]:
    """Every continuation with its log-probability: those that end with EOS, and those of full length."""
    model, (prompt, source) = model_of(family), asked(family)
    others = [token for token in range(5) if token != EOS]
    made = [[*ids, EOS] for n in range(length) for ids in itertools.product(others, repeat=n)]
    made += [list(ids) for ids in itertools.product(others, repeat=length)]
    return [(log_probability(model, prompt, ids, **source), ids) for ids in made]


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.5, 2.5])
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_wide_enough_it_is_exhaustive(family, penalty):
    model = model_of(family)
    prompt, source = asked(family)
    wanted = sorted(((total / len(ids) ** penalty, ids) for total, ids in exhaustive(family)), reverse=True)
    close = 1e-6 if next(model.parameters()).device.type == "cpu" else 4e-6  # other kernels for other shapes
    assert len(wanted) == 1 + 4 + 16 + 64 + 256
    for early in (False, "never"):
        request = Request(
            max_new_tokens=4, num_beams=320, num_return=320, length_penalty=penalty, early_stopping=early
        )
        found = beam_search(model, request, Prompts([prompt], **source), ENDS_AT_EOS)[0]
        assert [one.score for one in found] == pytest.approx(
            [score for score, _ in wanted[:320]], abs=1e-5, rel=close
        )
        for one, (score, ids) in zip(found[:20], wanted):
            assert one.ids == [token for token in ids if token != EOS] and one.stop_reason == (
                "eos" if EOS in ids else "length"
            ), score


@pytest.mark.parametrize("penalty", [-2.0, -0.5, 0.0, 0.5, 1.0, 3.0])
def test_stopping_early_loses_nothing(penalty):
    """`never` gives what the same beams give when they run on to the last token: 6 models, narrow beams."""
    for seed in range(6):
        model = model_of("decoder", seed)
        request = Request(max_new_tokens=10, num_beams=2, length_penalty=penalty, early_stopping="never")
        short = beam_search(model, request, Prompts([[1, 3]]), ENDS_AT_EOS)
        assert short[0][0].score == pytest.approx(
            slow_groups(model, [1, 3], 10, 2, 1, 0.0, penalty)[0][0], rel=1e-6
        )


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_one_beam_is_greedy(family):
    for seed in range(5):
        model = model_of(family, seed)
        prompt, source = asked(family)
        request, prompts = Request(max_new_tokens=12), Prompts([prompt], **source)
        wanted = decode(model, request, prompts, ENDS_AT_EOS)[0]
        found = beam_search(model, request, prompts, ENDS_AT_EOS)[0][0]
        assert (found.ids, found.stop_reason) == (wanted.ids, wanted.stop_reason)
        m = ch.Model(model, special={"eos": EOS, "decoder_start": 1})
        given = source["source"][0] if source else prompt
        assert m.generate(given, 12, num_beams=1).ids == wanted.ids


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_the_score_is_that_of_the_text(family):
    m = ch.Model(model_of(family, 2, vocab_size=9), special={"eos": EOS, "decoder_start": 1})
    prompt, reasons = [5, 6, 7], set()
    options = {"num_beams": 6, "num_return": 6}
    for penalty, made in (
        (p, made) for p in (1.0, 0.0, -0.7) for made in m.generate(prompt, 15, length_penalty=p, **options)
    ):
        new = [*made.ids, EOS] if made.stop_reason == "eos" else made.ids
        reasons.add(made.stop_reason)
        scored = (
            m.score([*prompt, *new]).logprobs[3:]
            if family == "decoder"
            else m.score(new, source=prompt).logprobs
        )
        assert made.score == pytest.approx(sum(scored) / len(new) ** penalty, abs=1e-5, rel=1e-6)
    assert reasons == {"eos", "length"}


@pytest.mark.ledger("G3")
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(
    "options",
    [{}, {"early_stopping": True}, {"num_beam_groups": 2, "diversity_penalty": 0.8}, {"no_repeat_ngram": 2}],
)
def test_a_batch_is_its_rows(family, options):
    """Prompts of 1 to 40 tokens, more than are carried on at once, rows that end at different times."""
    m = ch.Model(model_of(family, 3, vocab_size=60), special={"eos": EOS, "decoder_start": 1})
    lengths = [1, 40, 2, 7, 19, 33, 5, 1, 12, 26, 3, 8, 40, 17, 4, 9, 21]
    prompts = [
        torch.randint(60, (n,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, n in enumerate(lengths)
    ]
    together = m.generate(prompts, 14, num_beams=4, num_return=4, **options)
    ends = set()
    for prompt, row in zip(prompts, together):
        alone = m.generate(prompt, 14, num_beams=4, num_return=4, **options)
        assert [(one.ids, one.stop_reason) for one in row] == [(one.ids, one.stop_reason) for one in alone]
        assert [one.score for one in row] == pytest.approx([one.score for one in alone], abs=1e-4)
        scores = [one.score for one in row]
        assert scores == sorted(scores, reverse=True)
        if "num_beam_groups" not in options:
            assert len({(*one.ids, one.stop_reason) for one in row}) == 4
        ends |= {one.stop_reason for one in row}
    assert ends == {"eos", "length"}
    best = m.generate(prompts, 14, num_beams=4, **options)
    assert [one.ids for one in best] == [row[0].ids for row in together]


def theirs(model, ids: torch.Tensor, new: int, **options) -> list[tuple[list[int], float | None]]:
    """New tokens up to the end, and the score, of each sequence that transformers returns."""
    settings = dict(
        do_sample=False, forced_eos_token_id=None, return_dict_in_generate=True, output_scores=True
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **settings, **options)
    begun = 1 if model.config.is_encoder_decoder else ids.shape[1]
    rows = [row[begun : begun + new].tolist() for row in out.sequences]
    scores = out.sequences_scores.tolist() if options["num_beams"] > 1 else [None] * len(rows)
    return [(row[: row.index(EOS)] if EOS in row else row, score) for row, score in zip(rows, scores)]


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.cpu
@pytest.mark.slow
def test_equal_to_transformers(name, tmp_path):
    """Twelve random models: greedy, and three of four beams, with every stopping rule and either sign."""
    kind, config = REFERENCES[name]
    choices = itertools.cycle(itertools.product([1.0, 0.0, 2.0, -1.0], [False, True, "never"]))
    ended = 0
    for seed in range(12):  # as many as there are choices
        folder = tmp_path / str(seed)
        reference = (seq2seq if config.is_encoder_decoder else harness).reference(kind, config, folder, seed)
        m = ch.load(folder)
        m.generation.pop("forced_eos_token_id", None)
        ids = torch.randint(3, 13, (1, 1 + seed % 9), generator=torch.Generator().manual_seed(seed))
        greedy = m.generate(ids[0], 10)
        assert [greedy.ids] == [row for row, _ in theirs(reference, ids, 10, num_beams=1)], seed
        penalty, early = next(choices)
        options = {"num_beams": 4, "length_penalty": penalty, "early_stopping": early}
        wanted = theirs(reference, ids, 10, num_return_sequences=3, **options)
        made = m.generate(ids[0], 10, num_return=3, **options)
        assert [one.ids for one in made] == [row for row, _ in wanted], (seed, options)
        assert [one.score for one in made] == pytest.approx([score for _, score in wanted], abs=1e-4), (
            seed,
            options,
        )
        ended += sum(one.stop_reason == "eos" for one in made)
    assert 0 < ended < 36  # some end by themselves, some by length


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram": 2},
        {"banned": (7, 9)},
        {"logit_bias": {7: 2.5, 9: -100.0, EOS: -1.5}},
        {"logit_bias": {3: -2.0, 8: 1.5}, "repetition_penalty": 1.4},
    ],
    ids=str,
)
def test_adjusted_as_in_transformers(options, tmp_path):
    """Penalties and biases change log-probabilities, and so the scores; greedy and by beams."""
    names = {"no_repeat_ngram": "no_repeat_ngram_size"}
    more = {names.get(name, name): value for name, value in options.items()}
    if "banned" in more:
        more = {"suppress_tokens": list(more["banned"])}
    if "logit_bias" in more:
        more["sequence_bias"] = [[[token], bias] for token, bias in more.pop("logit_bias").items()]
    kind, config = REFERENCES["llama"]
    for seed in range(2):
        reference = harness.reference(kind, config, tmp_path / str(seed), seed)
        m = ch.load(tmp_path / str(seed))
        ids = torch.randint(3, 13, (1, 6), generator=torch.Generator().manual_seed(seed))
        greedy = theirs(reference, ids, 12, num_beams=1, **more)
        assert [m.generate(ids[0], 12, num_beams=1, **options).ids] == [row for row, _ in greedy]
        wanted = theirs(reference, ids, 12, num_beams=3, num_return_sequences=2, **more)
        made = m.generate(ids[0], 12, num_beams=3, num_return=2, **options)
        assert [one.ids for one in made] == [row for row, _ in wanted]
        assert [one.score for one in made] == pytest.approx([score for _, score in wanted], abs=1e-4)


@pytest.mark.cpu
def test_a_forced_first_token_counts_as_written(tmp_path):
    """As in transformers: it has a place in the length, and no log-probability."""
    kind, config = REFERENCES["bart"]
    reference = seq2seq.reference(kind, config, tmp_path / "model", 4)
    m = ch.load(tmp_path / "model")
    m.generation.pop("forced_eos_token_id", None)
    m.special["forced_bos"] = 0
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = theirs(reference, ids, 13, num_beams=4, num_return_sequences=4, forced_bos_token_id=0)
    made = m.generate(ids[0], 13, num_beams=4, num_return=4)
    assert [one.ids for one in made] == [row for row, _ in wanted]
    assert [one.score for one in made] == pytest.approx([score for _, score in wanted], abs=1e-4)


def slow_groups(model, prompt, length, beams, groups, diversity, penalty):
    """Diverse beam search spelled out, nothing cached, batched or stopped early: (score, ids) best first."""
    size = beams // groups
    live = [[(0.0, [])] for _ in range(groups)]
    found = [[] for _ in range(groups)]
    for step in range(1, length + 1):
        said = collections.Counter()
        for group in range(groups):
            ways = []
            for total, ids in live[group]:
                with torch.inference_mode():
                    values = (
                        model(torch.tensor([[*prompt, *ids]])).logits[0, -1].double().log_softmax(-1).tolist()
                    )
                ways += [
                    (total + value - diversity * said[token], [*ids, token])
                    for token, value in enumerate(values)
                ]
            ways.sort(reverse=True)
            found[group] += [
                (total / step**penalty, ids) for total, ids in ways[:size] if ids[-1] == EOS or step == length
            ]
            found[group] = sorted(found[group], reverse=True)[:size]
            live[group] = [way for way in ways if way[1][-1] != EOS][:size]
            said.update(ids[-1] for _, ids in live[group])
    return sorted(itertools.chain(*found), reverse=True)


@pytest.mark.ledger("G1")
@pytest.mark.parametrize("diversity", [0.0, 0.6, 3.0])
def test_diverse_groups(diversity):
    """Against the slow reference; so wide a rule that no search ends before its time."""
    for seed in range(4):
        model = model_of("decoder", seed, vocab_size=9)
        request = Request(
            max_new_tokens=7,
            num_beams=6,
            num_return=6,
            num_beam_groups=3,
            diversity_penalty=diversity,
            early_stopping="never",
            length_penalty=3.0,
        )
        found = beam_search(model, request, Prompts([[1, 4]]), ENDS_AT_EOS)[0]
        wanted = slow_groups(model, [1, 4], 7, 6, 3, diversity, 3.0)
        assert [one.score for one in found] == pytest.approx([score for score, _ in wanted], abs=1e-5)
        if diversity:
            assert [one.ids for one in found] == [
                [token for token in ids if token != EOS] for _, ids in wanted
            ]
    firsts = {one.ids[0] for one in found if one.ids}
    assert len(firsts) >= (3 if diversity == 3.0 else 1)


def test_fewer_than_asked_where_no_more_are_possible():
    m = ch.Model(model_of("decoder"), special={"eos": EOS})
    made = m.generate([1], 3, num_beams=5, num_return=5, allowed=(EOS, 4))
    assert sorted(one.ids for one in made) == [[], [4], [4, 4], [4, 4, 4]]


def test_time_ends_a_search():
    m = ch.Model(model_of("decoder", vocab_size=40))
    made = m.generate([1], 30, num_beams=3, num_return=3, seconds=0.0)
    assert [(one.stop_reason, len(one.ids)) for one in made] == [("time", 1)] * 3


def test_watched_keys_are_per_beam():
    """The eager kernel gives what the fused one gives where beams share the keys of a source."""
    m = ch.Model(model_of("encoder-decoder", 2, vocab_size=40), special={"decoder_start": 1})
    sources = [[5, 6, 7], [8, 9]]
    plain = m.generate(sources, 6, num_beams=3)
    with ch.record(m.model, "blocks.0.cross.pattern") as seen:
        watched = m.generate(sources, 6, num_beams=3)
    assert [one.ids for one in watched] == [one.ids for one in plain]
    assert [tuple(call.shape) for call in seen.calls("blocks.0.cross.pattern")] == [(2, 4, 1, 3)] + [
        (6, 4, 1, 3)
    ] * 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2, "num_return": 3}, "num_return 3"),
        ({"num_return": 2}, "num_return 2"),
        ({"num_beams": 0}, "num_beams 0"),
        ({"num_beams": 2.5}, "num_beams 2.5"),
        ({"num_beams": 4, "temperature": 0.7}, "temperature with num_beams 4"),
        ({"num_beams": 4, "top_k": 5}, "top_k with num_beams 4"),
        ({"num_beams": 4, "stop": "x"}, "stop"),
        ({"num_beams": 4, "on_text": print}, "on_text"),
        ({"num_beams": 4, "logprobs": True}, "logprobs"),
        ({"num_beams": 4, "num_beam_groups": 3}, "divisible"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0}, "diversity_penalty -1.0"),
        ({"num_beams": 4, "length_penalty": "long"}, "length_penalty 'long'"),
        ({"num_beams": 4, "length_penalty": 400.0}, "length_penalty 400.0"),
        ({"num_beams": 4, "early_stopping": "soon"}, "early_stopping 'soon'"),
        ({"num_beams": 4, "lenght_penalty": 1.0}, "length_penalty"),
        ({"num_beams": 4, "banned": (999,)}, "vocabulary"),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(ch.InputError, match=words) as error:
        ch.Model(model_of("decoder")).generate([1], 5, **options)
    assert "\n" not in str(error.value)
