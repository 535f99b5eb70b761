"""The cache in 8 bits: what it keeps, what it takes, and what it is refused with."""

import pytest
import torch

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.run.quant.cache import Int8KV
from tests.quant.test_quant import CONFIGS, drawn

NAMES = ("GPT-2", "Llama, grouped, untied")


def rounded(x):
    """A plain loop over tokens and heads: 127 steps, of a scale in bfloat16, reach the largest number."""
    made = x.clone()
    for b, k, t in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        row = x[b, k, t]
        scale = float(torch.tensor(float(row.abs().max()) / 127).to(torch.bfloat16))
        if scale < float(row.abs().max()) / 127:
            scale = float(torch.tensor(float(row.abs().max()) / 127 * (1 + 2**-8)).to(torch.bfloat16))
        made[b, k, t] = (row / scale).round() * scale
    return made


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_pass_whose_keys_and_values_were_rounded_whatever_comes_at_a_time(name):
    model = drawn(CONFIGS[name]).double()
    torch.manual_seed(5)
    ids = torch.randint(61, (3, 11))
    changes = {f"blocks.{i}.attention.{one}": rounded for i in range(2) for one in "kv"}
    with torch.no_grad(), ch.edit(model, changes):
        wanted = model(ids).logits
    for sizes in ([1] * 11, [7, 1, 3]):
        cache = Cache(0, Int8KV)
        with torch.no_grad():
            parts = [model(part, cache=cache).logits for part in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert 1e-5 < (model(ids).logits - wanted).abs().max() < 0.05
        cache.crop(6)
        cache.reorder(torch.tensor([2, 0]))
        again = model(ids[[2, 0], 6:], cache=cache).logits
    torch.testing.assert_close(again, wanted[[2, 0], 6:], rtol=1e-11, atol=1e-11)


def test_it_takes_a_byte_for_each_number_and_two_for_each_scale():
    model, ids = drawn(CONFIGS["GPT-2"]), torch.randint(61, (2, 16))
    narrow, wide = Cache(16, Int8KV), Cache(16)
    with torch.no_grad():
        model(ids, cache=narrow), model(ids, cache=wide)
    numbers = 2 * 2 * 2 * 4 * 16  # layers, keys and values, rows, heads, tokens
    assert narrow.nbytes == numbers * (12 + 2)
    assert sum(one.nbytes for keys in wide.layers.values() for one in keys.buffers()) == numbers * 12 * 4


@pytest.mark.parametrize("name", NAMES)
def test_generation_takes_it_and_a_row_of_a_batch_comes_out_as_alone(name):
    m = ch.Model(drawn(CONFIGS[name]))
    prompts = [[5, 3, 8, 1], [7, 2], [9, 9, 4]]
    together = m.generate(prompts, 8, cache="int8", logprobs=True)
    for prompt, made in zip(prompts, together):
        ids, cache, scores = torch.tensor([prompt]), Cache(0, Int8KV), []
        with torch.no_grad():
            for _ in range(8):  # the model itself, token after token
                logits = m.model(ids[:, cache.length :], cache=cache).logits[0, -1]
                scores.append(float(logits.log_softmax(-1).max()))
                ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        assert made.ids == ids[0, len(prompt) :].tolist()
        assert made.logprobs == pytest.approx(scores, abs=1e-4)
    plain = m.generate(prompts, 8, logprobs=True)
    assert any(one.logprobs != other.logprobs for one, other in zip(together, plain))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache": "int4"}, "cache 'int4' is not allowed"),
        ({"num_beams": 2}, 'num_beams with cache "int8"'),
        ({"lookup": 2}, 'lookup with cache "int8"'),
        ({"reuse": True}, 'reuse with cache "int8"'),
        ({"compile": True}, 'compile with cache "int8"'),
        ({"early_exit": 0.9}, 'early_exit with cache "int8"'),
        ({"overflow": "stream"}, 'overflow with cache "int8"'),
    ],
)
def test_what_it_has_no_form_for_is_refused_by_name(options, says):
    with pytest.raises(ch.InputError, match=says):
        ch.Model(drawn(CONFIGS["GPT-2"])).generate([1, 2], 4, **{"cache": "int8", **options})


def test_layers_that_take_some_tokens_alone_are_refused():
    config = CONFIGS["Llama, grouped, untied"].replace(depth_capacity=(0.5, 1.0))
    with pytest.raises(ch.InputError, match="depth_capacity"):
        ch.Model(drawn(config)).generate([1, 2], 4, cache="int8")
