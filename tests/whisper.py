"""A small Whisper of random weights, and sounds for it."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
import transformers
from tokenizers import AddedToken

from tests.harness import byte_tokenizer
from tests.parity.harness import reference


def whisper_folder(path: pathlib.Path, alert: bool = False) -> pathlib.Path:
    """Save a Whisper of 2 languages with windows of one second, by transformers, with a tokenizer.

    `alert`: its heads look at a few places of the sound, it writes letters and spaces alone, is never unsure
    enough to be asked again, and has a token for text before a transcript.
    """
    tokenizer = byte_tokenizer()
    names = ["startoftranscript", "en", "de", "translate", "transcribe", "nospeech", "notimestamps"]
    names[5:5] = ["startofprev"] if alert else []
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    times = [AddedToken(f"<|{number / 50:.2f}|>", special=False) for number in range(51)]
    tokenizer.add_tokens(times)
    id_of = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ["end", *names]}
    config = transformers.WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), num_mel_bins=8, d_model=24, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_source_positions=50, max_target_positions=40, pad_token_id=id_of["end"],
        bos_token_id=id_of["end"], eos_token_id=id_of["end"], begin_suppress_tokens=None,
        decoder_start_token_id=id_of["startoftranscript"],
    )  # fmt: skip
    model = reference("WhisperForConditionalGeneration", config, path)
    with torch.no_grad():  # so that what is heard changes what is written, and times are written too
        model.model.encoder.embed_positions.weight.mul_(0.1)
        model.proj_out.weight[id_of["notimestamps"] :] *= 0.7
        for layer in model.model.decoder.layers if alert else ():
            layer.encoder_attn.q_proj.weight.mul_(40)
    model.save_pretrained(path)
    rules = {
        **{"no_timestamps_token_id": id_of["notimestamps"], "is_multilingual": True, "max_length": 40},
        **{"lang_to_id": {f"<|{code}|>": id_of[code] for code in ("en", "de")}},
        **{"task_to_id": {task: id_of[task] for task in ("translate", "transcribe")}},
        **{"suppress_tokens": [5, 6, id_of["nospeech"]], "begin_suppress_tokens": [7, id_of["end"]]},
        **{"eos_token_id": id_of["end"], "pad_token_id": id_of["end"], "max_initial_timestamp_index": 20},
        "decoder_start_token_id": id_of["startoftranscript"],
    }
    if alert:
        letters = {tokenizer.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyzĠ"}
        rules["suppress_tokens"] = [*({*range(256)} - letters), id_of["nospeech"], id_of["startofprev"]]
        rules |= {"compression_ratio_threshold": 99.0, "logprob_threshold": -99.0, "no_repeat_ngram_size": 2}
    (path / "generation_config.json").write_text(json.dumps(rules))
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def sounds() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    made = []
    for seconds in (0.3, 1.0, 3.37, 0.9):
        noise = random.standard_normal(int(16_000 * seconds)).astype(np.float32)
        made.append(noise * np.abs(np.sin(np.arange(len(noise)) / 2500)).astype(np.float32) * 0.1)
    return made
