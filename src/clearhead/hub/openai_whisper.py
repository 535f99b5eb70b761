"""OpenAI's own layout of Whisper: one .pt file of sizes and tensors, and a vocabulary next to the package.

`unpack` writes such a file as a Hugging Face directory, with the tokenizer, the rules of decoding and the
settings of the spectrogram that belong to it.
"""

import base64
import binascii
import itertools
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from clearhead.errors import CheckpointError
from clearhead.hub import files
from clearhead.hub.files import refuse
from clearhead.hub.preprocessor import CLASS, PREPROCESSOR
from clearhead.hub.tokenizer import SPEECH, save_tokenizer
from clearhead.hub.tokens.text import assembled, byte_letters
from clearhead.hub.weights import unpickled

_LISTED = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish
pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese
he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian
th thai ur urdu hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak
te telugu fa persian lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian
mk macedonian br breton eu basque is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh
sq albanian sw swahili gl galician mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali
af afrikaans oc occitan ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao
uz uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish
my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir
jw javanese su sundanese yue cantonese
"""
_WORDS = _LISTED.split()
LANGUAGES = {code: name.replace("_", " ") for code, name in zip(_WORDS[::2], _WORDS[1::2])}
CODES = {name: code for code, name in LANGUAGES.items()} | {
    **{"burmese": "my", "castilian": "es", "flemish": "nl", "haitian": "ht", "letzeburgesch": "lb"},
    **{"mandarin": "zh", "moldavian": "ro", "moldovan": "ro", "panjabi": "pa", "pushto": "ps"},
    **{"sinhalese": "si", "valencian": "ca"},
}


SIZES = {  # of config.json, by their names in `dims`
    "n_mels": "num_mel_bins",
    "n_vocab": "vocab_size",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}
NAMES = (  # parts of a tensor's name, theirs and Hugging Face's
    (r"^", "model."),
    (r"blocks\.(\d+)", r"layers.\1"),
    (r"mlp_ln", "final_layer_norm"),
    (r"mlp\.0", "fc1"),
    (r"mlp\.2", "fc2"),
    (r"cross_attn_ln", "encoder_attn_layer_norm"),
    (r"cross_attn\b", "encoder_attn"),
    (r"\battn_ln", "self_attn_layer_norm"),
    (r"\battn\b", "self_attn"),
    (r"\.(query|key|value|out)\.", lambda found: f".{found[1][0] if found[1] != 'out' else 'out'}_proj."),
    (r"(ln_post|\.ln)\.", lambda found: f"{'.' if found[1] == '.ln' else ''}layer_norm."),
    (r"token_embedding", "embed_tokens"),
    (r"positional_embedding", "embed_positions.weight"),
)
TASKS = ("translate", "transcribe")
FRAME_SECONDS, CHUNK = 0.02, 30  # of one encoder position; of one window
# What a transcript never holds: signs for music and speakers, which subtitles use.
LETTERS = '"#()*+/:;<=>@[\\]^_`{|}~「」『』'
GROUPS = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
MUSIC = "♩♪♫♬♭♮♯"  # of these the first token alone is enough
OFFICIAL = 51765  # tokens of a vocabulary besides its languages and the one that multilingual files have more


def unpack(source: Path, vocabulary: Path | None, folder: Path) -> None:
    """Write one of OpenAI's .pt files as a directory of Hugging Face's layout, in float32.

    `vocabulary` is the .tiktoken file of OpenAI's package; without it the directory has no tokenizer.
    """
    dims, tensors = _read(source)
    config: dict[str, Any] = {ours: dims[theirs] for theirs, ours in SIZES.items()}
    width = dims["n_audio_state"]
    refuse(
        dims.get("n_text_state") != width,
        f"{source} has n_text_state {dims.get('n_text_state')} and n_audio_state {width}: they must be equal",
    )
    config |= {
        **{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
        **{"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "torch_dtype": "float32"},
    }
    save_file({name: value.float().contiguous() for name, value in tensors.items()}, folder / files.WEIGHTS)
    settings = {"feature_extractor_type": CLASS, "feature_size": dims["n_mels"], "chunk_length": CHUNK}
    files.write_json(folder / PREPROCESSOR, settings)
    if vocabulary is not None:
        tokenizer = read_vocabulary(vocabulary, dims["n_vocab"])
        generation = rules_of(tokenizer, dims["n_text_ctx"], vocabulary)
        ids = {name: generation[name] for name in generation if name.endswith("_token_id")}
        config |= {name: ids[name] for name in ids if name not in ("no_timestamps_token_id",)}
        files.write_json(folder / "generation_config.json", generation)
        end = generation["eos_token_id"]
        roles = dict.fromkeys(("bos", "eos", "pad", "unk"), end)
        added = tokenizer.get_added_tokens_decoder().items()
        extra = [token.content for number, token in sorted(added) if token.special and number != end]
        settings = {"tokenizer_class": SPEECH, "extra_special_tokens": extra}
        save_tokenizer(folder, tokenizer, roles, settings, dims["n_text_ctx"])
    files.write_json(folder / "config.json", config)


def _read(source: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the sizes that a file states, and its tensors by Hugging Face's names; no code in it is run."""
    refuse(not source.is_file(), f"{source} is no file: name a model directory or a .pt file")
    stored = unpickled(source)
    dims, state = stored.get("dims"), stored.get("model_state_dict")
    sized = isinstance(dims, dict) and all(type(dims.get(name)) is int for name in SIZES)
    filled = isinstance(state, dict) and all(isinstance(x, Tensor) for x in state.values())
    if not sized or not filled or dims is None or state is None:
        raise CheckpointError(
            f"{source} is no Whisper file of OpenAI's: it must hold dims, all whole numbers, and "
            "model_state_dict, all tensors; name the directory of any other model"
        )
    renamed = list(map(str, state))
    for theirs, ours in NAMES:
        renamed = [re.sub(theirs, ours, name) for name in renamed]
    return dims, dict(zip(renamed, state.values()))


def read_vocabulary(path: Path, size: int) -> Tokenizer:
    """Return the tokenizer of a .tiktoken file, with the special tokens of a model of `size` tokens.

    Each line has a token in base64 and its rank. The tokens after it are the end of a text, the beginning of
    a transcript, languages, tasks, and a timestamp for each position of a window.
    """
    pieces = _pieces(path)
    timestamps = [f"<|{number * FRAME_SECONDS:.2f}|>" for number in range(CHUNK * 50 + 1)]
    n_languages = size - len(pieces) - len(timestamps) - 8
    refuse(
        not 0 <= n_languages <= len(LANGUAGES),
        f"{path} has {len(pieces):,} tokens, which is no vocabulary of a model of {size:,}: English-only "
        "models have gpt2.tiktoken, all others multilingual.tiktoken",
    )
    special = [
        *("endoftext", "startoftranscript", *list(LANGUAGES)[:n_languages], *TASKS),
        *("startoflm", "startofprev", "nospeech", "notimestamps"),
    ]
    letters = dict(enumerate(byte_letters()))
    written = {piece: "".join(letters[byte] for byte in piece) for piece in pieces}
    vocabulary = {written[piece]: rank for piece, rank in pieces.items()}
    halves = (_halves(piece, pieces) for piece in pieces if len(piece) > 1)
    merges = [(written[first], written[second]) for first, second in halves]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = assembled(models.BPE(vocabulary, merges), None, split, decoders.ByteLevel())
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in timestamps])
    around = ["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{around[0]} {around[1]} $A {around[2]}",
        pair=f"{around[0]} {around[1]} $A $B:1 {around[2]}:1",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in around],
    )
    return tokenizer


def _pieces(path: Path) -> dict[bytes, int]:
    """Return the tokens of a .tiktoken file, as bytes, with their ranks, in order."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
        bare = [(token.rstrip("="), int(rank)) for token, rank in lines]  # "=" is a token without any byte
        pieces = {
            base64.b64decode(f"{token}{'=' * (-len(token) % 4)}", validate=True): rank for token, rank in bare
        }
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, binascii.Error):
        raise CheckpointError(
            f"{path} is no vocabulary: each line must be a token in base64 and a rank"
        ) from None
    ordered = sorted(pieces, key=pieces.__getitem__)
    single = {bytes([number]) for number in range(256)}
    refuse(
        [pieces[piece] for piece in ordered] != list(range(len(lines))) or not single <= pieces.keys(),
        f"{path} is no whole vocabulary: ranks must go from 0 on, each once, and every byte be a token",
    )
    return {piece: pieces[piece] for piece in ordered}


def _halves(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that a token was merged from: what its bytes become by the merges before it."""
    parts = [piece[place : place + 1] for place in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def rules_of(tokenizer: Tokenizer, positions: int, path: Path) -> dict[str, Any]:
    """Return the generation_config.json of a model with this tokenizer, as OpenAI's own decoding goes."""

    def number(name: str) -> int:
        token = tokenizer.token_to_id(f"<|{name}|>")
        assert token is not None, path
        return int(token)

    first = number("transcribe")
    multilingual = tokenizer.get_vocab_size() > OFFICIAL + 99
    end, start = number("endoftext"), number("startoftranscript")
    rules: dict[str, Any] = {
        **{"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start},
        **{"is_multilingual": multilingual, "return_timestamps": False, "max_length": positions},
        **{"max_initial_timestamp_index": 50, "no_timestamps_token_id": number("notimestamps")},
        "prev_sot_token_id": number("startofprev"),
        "begin_suppress_tokens": [*tokenizer.encode(" ", add_special_tokens=False).ids, end],
        "suppress_tokens": sorted(
            {*_signs(tokenizer), start, *range(number("translate"), number("notimestamps"))}
        ),
    }
    if multilingual:
        known = [code for code in LANGUAGES if tokenizer.token_to_id(f"<|{code}|>") is not None]
        rules |= {
            "lang_to_id": {f"<|{code}|>": number(code) for code in known},
            "task_to_id": {task: number(task) for task in TASKS},
            "forced_decoder_ids": [[1, None], [2, first]],
        }
    return rules


def _signs(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that begin with a sign: each that is one token, and the first of a note."""
    ids_found = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in (" -", " '")}
    for sign in (*LETTERS, *GROUPS.split(), *MUSIC):
        for text in (sign, f" {sign}"):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == 1 or sign in MUSIC:
                ids_found.add(ids[0])
    return ids_found
