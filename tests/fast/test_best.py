"""The best tokens found in C are those of log-probabilities in float64, and a search goes by either."""

import pytest
import torch

import clearhead as ch
from clearhead.run.generate import beam
from clearhead.run.generate.beam import beam_search
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.run.kernels import library
from clearhead.run.kernels.native import best_tokens

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="no C compiler, or other threads than GNU's"),
    pytest.mark.cpu,
]
GONE = float("-inf")


@pytest.mark.parametrize("width", [1, 5, 16, 31, 64, 65, 1000, 32_003])
@pytest.mark.parametrize("scale", [0.01, 4.0, 60.0])
def test_the_best_and_their_log_probabilities(width, scale):
    torch.manual_seed(width)
    logits, count = torch.randn(5, width) * scale, min(width, 9)
    values, ids = best_tokens(logits, logits, count)
    expected = logits.double().log_softmax(-1).topk(count)
    assert torch.equal(ids, expected.indices)
    assert (values - expected.values).abs().max() <= 2e-6 * max(1.0, scale)


def test_removed_tokens_count_in_the_sum_and_are_not_chosen():
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    kept = logits.index_fill(-1, logits[0].topk(4).indices, GONE)
    values, ids = best_tokens(logits, kept, 6)
    expected = logits.double().log_softmax(-1).masked_fill(kept == GONE, GONE).topk(6)
    assert torch.equal(ids, expected.indices) and (values - expected.values).abs().max() <= 2e-6


def test_too_few_are_filled_up_and_the_first_of_equals_comes_first():
    kept = torch.full((1, 40), GONE)
    kept[0, [30, 7, 20]] = torch.tensor([1.0, 1.0, 2.0])
    values, ids = best_tokens(kept, kept, 5)
    assert ids[0].tolist()[:3] == [20, 7, 30]
    assert values[0, 3:].tolist() == [GONE, GONE] and int(ids.min()) >= 0 and int(ids.max()) < 40


@pytest.mark.parametrize("place", [0, 17, 49])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_comes_out_as_none(place, bad):
    logits = torch.zeros(2, 50)
    logits[1, place] = bad
    values, _ = best_tokens(logits, logits, 4)
    assert values[1].isnan().all() and not values[0].isnan().any()


OPTIONS = {
    "nothing": {},
    "banned": {"banned": (3, 5)},
    "few allowed": {"allowed": (2, 4, 6)},
    "least length": {"min_new_tokens": 4},
    "forced": {"forced_last": (2,), "forced_first": 7},
    "not first": {"banned_first": (1, 2, 8)},
    "groups": {"num_beam_groups": 2},
    "looking back": {"repetition_penalty": 1.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["micro-decoder", "micro-encoder-decoder"])
def test_a_search_is_the_same_without_it(family, options, monkeypatch):
    torch.manual_seed(0)
    model = ch.Transformer(ch.preset(family).replace(d_model=32, n_heads=2, n_layers=2, vocab_size=13)).eval()
    for weight in model.parameters():
        weight.data *= 2.0  # tokens that differ
    both = model.decoder is not None and model.encoder is not None
    source = torch.tensor([[4, 5, 6], [7, 8, 9]]) if both else None
    prompts = Prompts([[1], [1]] if both else [[1, 4], [3]], source)
    request = Request(num_beams=4, num_return=4, max_new_tokens=7, **options)
    asked = []

    def noted(*given):
        asked.append(given)
        return best_tokens(*given)

    found = []
    for way in (noted, lambda *_: None):
        monkeypatch.setattr(beam, "best_tokens", way)
        found.append(beam_search(model, request, prompts, Ends(frozenset([2]))))
    assert bool(asked) is not request.looks_back
    for rows, others in zip(*found, strict=True):
        assert [row.ids for row in rows] == [row.ids for row in others]
        assert [row.score for row in rows] == pytest.approx([row.score for row in others], abs=1e-5)
