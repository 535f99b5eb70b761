"""`clearhead bench`: what is timed, beside whom, and the least that it could take."""

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.errors import InputError
from clearhead.labs.speed import jobs
from clearhead.labs.speed.compare import PEERS, Rival, check_answer, compare, ours
from clearhead.labs.speed.jobs import Machine, SpeedSizes, jobs_of
from clearhead.labs.speed.llama import Llama, written
from tests.test_plain_faults import refused
from tests.test_tasks import saved

SMALL = SpeedSizes(prompt=8, new=4, batches=(1, 3))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure the machine by small matrices: what it says of this machine is not what is tested."""
    monkeypatch.setitem(jobs.READ, "cpu", 2**20)
    monkeypatch.setitem(jobs.WIDTH, "cpu", 64)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=64, num_key_value_heads=2, max_position_embeddings=40, tie_word_embeddings=False, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_every_program_writes_the_same_tokens_and_no_weight_changes(decoder):
    m = ch.load(decoder)
    before = {name: weight.clone() for name, weight in m.model.named_parameters()}
    found = compare(m, sizes=SMALL, peers=["transformers"], rounds=1)
    assert [job.kind for job in found.jobs] == ["first", "decode", "decode", "train"]
    for job in found.jobs:
        ours, theirs = job.timings
        assert (ours.program, theirs.program) == ("clearhead", "transformers")
        assert theirs.ours_over_this == pytest.approx(theirs.seconds / ours.seconds)
        assert job.share_of_limit == pytest.approx(job.least_seconds / ours.seconds)
        assert theirs.same_tokens == (None if job.kind == "train" else 1.0)
    assert all(torch.equal(before[name], weight) for name, weight in m.model.named_parameters())


def test_the_least_is_what_must_be_read_and_computed(decoder):
    """By hand: every weight but the table of tokens once a step, and the keys and values of three rows."""
    m = ch.load(decoder)
    job = jobs_of(m, ("decode",), SMALL)[1]
    weights = sum(parameter.numel() for parameter in m.model.parameters()) - 64 * 16
    cached = 3 * (16 + 3) * 2 * 2 * 2 * 4  # rows, tokens, layers, keys and values, heads, width of a head
    assert job.read == 4 * (4 * weights + 3 * cached)
    body = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24)  # layers: queries and out, keys and values, the rest
    seen = 2 * 2 * 16 * 19 / 2  # layers, scores and answer, width, half of the tokens
    assert job.flops == 3 * 2 * (19 * (body + seen) + 4 * 16 * 64)  # scores of what is written alone
    made = Machine("", 1, "float32", bandwidth=1e6, arithmetic=1e9)
    assert made.least(2e6, 1e9) == 2.0 and made.least(1e6, 3e9) == 3.0


def test_an_encoder_reads_the_prompt_once_and_the_decoder_writes_alone():
    sizes = {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 24, "max_positions": 40}
    m = ch.Model(ch.Transformer(ch.ModelConfig(family="encoder-decoder", bias=False, **sizes)))
    job = jobs_of(m, ("decode",), SMALL)[0]
    layer = 4 * 16 * 16 + 2 * 16 * 24
    encoder = 16 * (layer + 2 * 16 * 16)  # tokens; two products of width 16 with all 16 of them
    decoder = 4 * (layer + 2 * 16 * 16 + 2 * 16 * 4 / 2 + 2 * 16 * 16 + 16 * 64)  # cross: q, out; 16 tokens
    keys = 16 * 2 * 16 * 16  # of the source, once
    assert job.flops == 2 * (encoder + decoder + keys)


def test_quantized_weights_are_read_at_their_size(decoder):
    dense, small = ch.load(decoder), ch.load(decoder, quantize="int8")
    assert jobs_of(small, ("decode",), SMALL)[0].read < 0.6 * jobs_of(dense, ("decode",), SMALL)[0].read
    assert all(job.kind != "train" for job in jobs_of(small, ("decode", "train"), SMALL))


def test_few_bits_are_those_of_llama_cpp(shared, monkeypatch):
    """stories260K in four bits: the file for llama.cpp is Q4_0, and it writes."""
    pytest.importorskip("xllamacpp")
    kinds, save = [], ch.Model.save
    monkeypatch.setattr(ch.Model, "save", lambda m, path, kind: (kinds.append(kind), save(m, path, kind)))
    folder = shared / "weights/stories260K"
    m = ch.load(folder / "hf", tokenizer=folder / "tok512.bin", quantize="int4")
    found = compare(m, ("decode",), SpeedSizes(new=4, batches=(1,)), ["llama.cpp"], rounds=1)
    assert kinds == ["Q4_0"] and found.notes == ()
    assert [timing.program for timing in found.jobs[0].timings] == ["clearhead", "llama.cpp"]


def test_a_reply_of_llama_cpp_that_is_an_error_is_no_speed(shared, tmp_path):
    """Real replies: a prompt beyond its context, and fewer tokens than were asked for."""
    pytest.importorskip("xllamacpp")
    folder = shared / "weights/stories260K"
    ch.load(folder / "hf", tokenizer=folder / "tok512.bin").save(tmp_path / "m.gguf", "float32")
    there = Llama(tmp_path / "m.gguf", 256, 1)
    try:
        assert there.write([1, 5, 9], 4) == 4
        with pytest.raises(InputError, match=r"request \(600 tokens\) exceeds the available context"):
            there.write([5] * 600, 4)
        assert there.write([5] * 254, 8) < 8
    finally:
        there.close()
    assert written({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, 3) == 4
    for reply, said in (
        ({"error": {"code": 500, "message": "no slot"}}, "no slot"),
        ({"error": "loading"}, "loading"),
        (None, "does not say how many tokens"),
        ({"usage": {"prompt_tokens": 2, "completion_tokens": 4}}, "has read 2 of the 3 tokens"),
    ):
        with pytest.raises(InputError, match=said):
            written(reply, 3)


class Peer:
    """A program that answers with what clearhead answers, changed by `change`; an error is raised."""

    def __init__(self, m, change, quick=False):
        self.m, self.change, self.quick, self.answers = m, change, quick, {}

    def __call__(self, job):
        real = ours(self.m).runs(job)

        def run():
            if not self.quick or job.name not in self.answers:
                self.answers[job.name] = real()
            changed = self.change(self.answers[job.name])
            if isinstance(changed, Exception):
                raise changed
            return changed

        return run


def with_peer(monkeypatch, m, change, **more):
    peer = Rival("peer", Peer(m, change, **more))
    monkeypatch.setitem(PEERS, "transformers", ("transformers", lambda *given: peer))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("decode", lambda rows: InputError("no memory\nand more"), "no memory"),
        ("decode", lambda rows: [row[:-1] for row in rows], "it wrote 3 tokens where 4 were asked for"),
        ("decode", lambda rows: [*rows[:-1], []], "it wrote 0 tokens where 4 were asked for"),
        ("decode", lambda rows: rows[:-1], "it answered 0 of 1 rows"),
        ("decode", lambda rows: [row + [1] for row in rows], "it wrote 5 tokens where 4 were asked for"),
        ("decode", lambda rows: {"error": {"code": 400}}, "no list of rows: {'error': {'code': 400}}"),
        ("decode", lambda rows: None, "its answer is no list of rows: None"),
        ("first", lambda rows: [3 for _ in rows], "it wrote 3 tokens where 1 were asked for"),
        ("train", lambda loss: float("nan"), "its loss is nan"),
    ],
)
def test_an_answer_that_is_less_than_the_job_is_no_speed(decoder, monkeypatch, kind, change, said):
    m = ch.load(decoder)
    with_peer(monkeypatch, m, change)
    sizes = SpeedSizes(prompt=8, new=4, batches=(1,))
    (job,) = compare(m, (kind,), sizes, peers=["transformers"], rounds=1).jobs
    mine, theirs = job.timings
    assert mine.per_second > 0 and mine.fault == ""
    assert (theirs.seconds, theirs.per_second, theirs.ours_over_this, theirs.same_tokens) == (None,) * 4
    assert said in theirs.fault and "\n" not in theirs.fault


def test_an_answer_that_fails_in_a_later_round_is_no_speed_either(decoder, monkeypatch):
    m, calls = ch.load(decoder), []
    with_peer(monkeypatch, m, lambda rows: calls.append(1) or (rows if len(calls) < 3 else [[]]))
    (job,) = compare(m, ("decode",), SpeedSizes(new=4, batches=(1,)), ["transformers"], rounds=5).jobs
    assert len(calls) == 3 and "it wrote 0 tokens" in job.timings[1].fault


def test_nothing_is_quicker_than_the_machine(decoder, monkeypatch, clearhead, tmp_path):
    """A program that has kept its answer: all its tokens are there, and no weight was read."""
    m = ch.load(decoder)
    with_peer(monkeypatch, m, lambda rows: rows, quick=True)
    # A machine of which clearhead gets a tenth at most.
    slow = Machine("", 1, "float32", bandwidth=1e7, arithmetic=1e9)
    monkeypatch.setattr("clearhead.labs.speed.compare.measure_machine", lambda *given: slow)
    (job,) = compare(m, ("decode",), SpeedSizes(new=4, batches=(1,)), ["transformers"], rounds=1).jobs
    mine, theirs = job.timings
    assert theirs.above_limit and theirs.per_second is None and theirs.seconds is None
    assert job.limit == pytest.approx(4 / job.least_seconds)
    assert mine.fault or mine.per_second <= 1.1 * job.limit
    given = ["bench", str(decoder), "--parts", "decode", "--new", "4", "--batches", "1", "--rounds", "1"]
    shown = clearhead(*given, f"--against transformers --plot {tmp_path}/a.png").out
    assert "above the limit" in shown and "peer has no speed of decode 4, batch 1" in shown


def test_encoders_read_texts(tmp_path):
    saved(tmp_path, "BertForSequenceClassification", num_labels=2)
    (job,) = compare(ch.load(tmp_path), ("read",), peers=["transformers"], rounds=1).jobs
    assert [timing.program for timing in job.timings] == ["clearhead", "transformers"]
    assert job.name.startswith("48 texts") and job.timings[0].per_second > 0
    assert all(timing.fault == "" for timing in job.timings)
    with pytest.raises(InputError, match="it answered 47 of 48 texts"):
        check_answer(jobs_of(ch.load(tmp_path), ("read",), SpeedSizes())[0], [0.0] * 47)


def test_an_encoder_decoder_in_transformers_writes_as_many_tokens(tmp_path):
    """Its answer begins with the token that the decoder starts from, which is not written."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=63, pad_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    (job,) = compare(ch.load(tmp_path), ("decode",), SpeedSizes(new=4, batches=(2,)), ["transformers"]).jobs
    assert [timing.fault for timing in job.timings] == ["", ""] and job.timings[1].same_tokens == 1.0


def test_a_program_that_ends_its_process_is_named(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="its process ended with code"):
        Llama(tmp_path / "no.gguf", 16, 1)


def test_the_command(decoder, clearhead, tmp_path):
    given = ["bench", str(decoder), "--prompt", "8", "--new", "2", "--batches", "1", "--rounds", "1"]
    body = clearhead(*given, f"--against none --json --plot {tmp_path}/a.png").json
    assert [job["kind"] for job in body["jobs"]] == ["first", "decode", "train"]
    assert body["machine"]["bandwidth"] > 0 and (tmp_path / "a.png").stat().st_size > 1000
    shown = clearhead(*given, "--against transformers").out
    assert "transformers" in shown and "of it" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--against", "transfomers"], 'did you mean "transformers"'),
        (["--rounds", "0"], "rounds is 0"),
        (["--new", "0"], "1 at least"),
        (["--parts", "read"], "none of read suits this model"),
    ],
)
def test_what_it_refuses(decoder, capsys, more, said):
    assert said in refused(capsys, "bench", decoder, *more)
