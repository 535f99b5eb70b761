"""Train tokenizers from files: exact where promised, equal from run to run, read alike by the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from clearhead.errors import InputError
from clearhead.hub.tokenizer import save_tokenizer
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import (
    GENERATOR,
    READER,
    SENTINELS,
    SMALL,
    TRANSLATOR,
    TextFiles,
    byte_tokenizer,
    choose,
    known_words,
    pieces,
    train_tokenizer,
)
from clearhead.learn.tasks.table import TASKS as SPECS
from tests.hub.corpus import HARD
from tests.tokens.toys import KINDS, LINES, TASKS, TEXT, digest, trained, write

pytestmark = pytest.mark.ledger("A1", "A3")
transformers.logging.set_verbosity_error()


@given(text=st.text())
@settings(max_examples=200)
def test_bytes_and_bpe_are_exact_on_any_unicode(text: str) -> None:
    for tokenizer in (byte_tokenizer(), trained("byte"), trained("bpe"), trained("bpe", "seq2seq")):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(text=st.text(st.sampled_from(sorted(set(TEXT)))))
def test_characters_that_were_seen_come_back_as_they_were(text: str) -> None:
    found = trained("char").encode(text)
    assert trained("char").decode(found.ids) == text
    assert len(found.ids) == len(text)


@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="▁")))
def test_unigram_falls_back_on_bytes(text: str) -> None:
    """Exact but for one space at the very start, which is what the first word begins with anyhow."""
    tokenizer = trained("unigram")
    found = tokenizer.encode(text)
    assert tokenizer.decode(found.ids) == text.removeprefix(" ")
    assert "<|unk|>" not in found.tokens
    assert tokenizer.decode(tokenizer.encode("<0x41> ☃").ids).endswith(" ☃")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["lm", "mlm", "denoise"])
def test_trained_from_files_saved_and_read_by_the_reference(kind: str, task: str, tmp_path: Path) -> None:
    made = train_tokenizer(write(tmp_path), TokensPlan(kind=kind), SPECS[task].specials, len(TEXT.encode()))
    special = {role: made.token_to_id(token) for role, token in SPECS[task].specials.roles(kind).items()}
    save_tokenizer(tmp_path, made, special)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*HARD, *LINES[:4], "".join(SPECS[task].specials.roles(kind).values())]:
        ids = made.encode(text).ids
        assert ours.encode(text).ids == ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == made.decode(ids)
    for role, index in special.items():
        assert getattr(theirs, f"{role}_token_id") == index
    assert theirs.pad_token_id != theirs.eos_token_id
    if task == "mlm":
        both = made.encode("The king", "speak")
        assert theirs("The king", "speak")["input_ids"] == both.ids
        assert (both.tokens[0], both.tokens[-1]) == ("[CLS]", "[SEP]")
        assert (both.type_ids[0], both.type_ids[-1]) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_special_tokens_are_never_split_and_never_text(kind: str, task: str) -> None:
    tokenizer, named = trained(kind, task, lowercase=True), SPECS[task].specials.roles(kind)
    assert ("unk" in named) == (kind not in ("byte", "bpe"))
    wanted = SPECS[task].specials.all(kind)
    assert [tokenizer.token_to_id(token) for token in wanted] == list(range(len(wanted)))
    assert set(named.values()) <= set(wanted) and (set(SENTINELS) <= set(wanted)) == (task == "denoise")
    for token in wanted[:6]:
        found = tokenizer.encode(f"king{token}men", add_special_tokens=False)
        assert found.tokens.count(token) == 1
        assert found.ids[found.tokens.index(token)] == tokenizer.token_to_id(token)
        assert token not in tokenizer.decode(found.ids)
    for a, b in (("pad", "eos"), ("pad", "sep"), ("pad", "bos")):
        assert a not in named or b not in named or named[a] != named[b]


@pytest.mark.parametrize("kind", ["char", "word", "wordpiece"])
def test_what_was_never_seen_is_unknown(kind: str) -> None:
    found = trained(kind).encode("☃")
    assert found.tokens == ["<|unk|>"]
    assert "<|unk|>" not in trained(kind).encode("The king's men").tokens


def test_nothing_stands_around_the_text_of_a_language_model() -> None:
    assert trained("bpe").encode("").ids == []
    assert trained("bpe", "seq2seq").encode("").tokens == ["</s>"]
    assert trained("wordpiece", "mlm").encode("").tokens == ["[CLS]", "[SEP]"]


def test_options() -> None:
    words = trained("word", pattern=r"\S+")
    assert words.encode("kings  men,").tokens == ["<|unk|>", "men,"]
    assert words.decode(words.encode("The  king's\nmen,").ids) == "The king's men,"
    assert trained("word").encode("king's men,").tokens == ["king", "'", "s", "men", ","]
    for kind in KINDS:
        ids = [trained(kind, lowercase=True).encode(text).ids for text in ("THE KING", "the king")]
        assert ids[0] == ids[1]


@pytest.mark.slow
def test_the_same_text_gives_the_same_file() -> None:
    """The library's hash tables differ from run to run, within a process and between two."""
    script = [sys.executable, "-c", "from tests.tokens.toys import digest\nprint(digest())"]
    other = subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip()
    assert digest() == digest() == other


def test_the_choice_follows_task_and_size() -> None:
    kinds = {
        size: choose(TokensPlan(), GENERATOR, size)[0] for size in (1000, SMALL - 1, SMALL, 10**8, 10**10)
    }
    assert [plan.kind for plan in kinds.values()] == ["char", "char", "bpe", "bpe", "bpe"]
    sizes = [plan.vocab_size for plan in kinds.values()]
    assert sizes[:2] == [None, None] and sizes[2] < sizes[3] < sizes[4] == 32768
    assert choose(TokensPlan(), READER, 1000)[0].kind == "wordpiece"
    assert choose(TokensPlan(pattern=r"\S+"), GENERATOR, 1000)[0].kind == "word"
    kept, said = choose(TokensPlan(kind="unigram", vocab_size=300), TRANSLATOR, 10**9)
    assert (kept.kind, kept.vocab_size) == ("unigram", 300) and "as asked" in said
    plan, said = choose(TokensPlan(), GENERATOR, 4_000_000)
    assert "bpe" in said and f"{plan.vocab_size:,}" in said and "4.0 MB" in said
    assert "as 9 bytes of text is little" in choose(TokensPlan(), GENERATOR, 9)[1]
    # A size that was chosen for the user is a limit.
    plan = choose(TokensPlan(kind="bpe"), GENERATOR, 5000)[0]
    assert train_tokenizer(LINES, plan, GENERATOR, 5000).get_vocab_size() < 1024


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_that_was_asked_for_is_met_or_refused(kind: str) -> None:
    """The largest and the smallest sizes that the messages name are sizes that work."""

    def train(size: int) -> int:
        plan = TokensPlan(kind=kind, vocab_size=size)
        return train_tokenizer(LINES, plan, GENERATOR, len(TEXT)).get_vocab_size()

    with pytest.raises(InputError, match=r"more than the data allows: kind \w+ finds \d+ tokens") as error:
        train(60_000)
    most = int(str(error.value).split("finds ")[1].split()[0])
    assert train(most) == most
    with pytest.raises(InputError, match=r"vocab_size 3 is too small: .* take \d+") as error:
        train(3)
    least = int(str(error.value).split("take ")[1].split(":")[0])
    assert train(least) == least <= most
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("texts", "plan", "task", "message"),
    [
        ([], {}, "lm", "nothing to train"),
        (["", " \n"], {"kind": "byte"}, "lm", "nothing to train"),
        (["a\n", "a"], {"kind": "bpe"}, "lm", 'only the character "a"'),
        (LINES, {"kind": "word", "pattern": "("}, "lm", "no regular expression"),
        (LINES, {"pattern": "QQQ"}, "lm", 'pattern "QQQ" finds no word in the text'),
        (LINES, {"kind": "bpe", "pattern": "a"}, "lm", "set kind to word"),
        (LINES, {"vocab_size": 300}, "lm", "kind char finds .* or leave it out, or set tokens.kind to bpe"),
        (LINES, {"vocab_size": 0}, "lm", "must lie between 1 and"),
        (LINES, {"kind": "bpe", "vocab_size": 10**9}, "lm", "must lie between 1 and"),
        (iter(LINES), {}, "lm", "read only once"),
        (LINES, {}, "image", 'task "image" has no tokens'),
    ],
)
def test_mistakes_are_one_line(texts: object, plan: dict[str, object], task: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        train_tokenizer(texts, TokensPlan(**plan), SPECS[task].specials, 1000)
    assert len(str(error.value).splitlines()) == 1


def test_text_in_pieces_is_the_text(tmp_path: Path) -> None:
    text = TEXT * 40 + "x" * 200_000 + "\ud800"
    parts = list(pieces([text, "end"], 1000))
    assert "".join(parts) == text.replace("\ud800", "\ufffd") + "end"
    assert max(map(len, parts)) <= 1000
    (tmp_path / "a.txt").write_bytes((text[:-1]).encode())
    read = TextFiles((tmp_path / "a.txt",))
    assert "".join(read) == text[:-1] == "".join(read)
    assert max(map(len, read)) <= 1 << 16
    with pytest.raises(InputError, match="cannot be read"):
        list(TextFiles((tmp_path / "none.txt",)))


def test_new_words_are_left_out_once_the_room_is_full() -> None:
    known = list(known_words(["one two ", "two  three\n", "one four two", " one "], 8))
    assert known == ["one two ", "two  three\n", "one  two", " one "]


def test_a_text_without_a_space_can_be_learned_from() -> None:
    text = ["".join(chr(0x4E00 + (place * place) % 97) for place in range(20_000))]
    for kind in KINDS:
        made = train_tokenizer(text, TokensPlan(kind=kind), GENERATOR, 60_000)
        assert made.get_vocab_size() >= (256 if kind in ("byte", "bpe") else 4)


MEMORY = """
import random, sys
from clearhead.hub.tokens import training
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
class Distinct:  # 12 MB on one line, hardly a word of it twice
    def __iter__(self):
        draw, letters = random.Random(0), str.maketrans("0123456789", "ghijklmnop")
        for _ in range(11):
            yield draw.randbytes(500_000).hex(" ", 4).translate(letters) + " "
def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
training.ROOM[sys.argv[1]] = int(sys.argv[2])
before = memory("VmRSS")
train_tokenizer(Distinct(), TokensPlan(kind=sys.argv[1], vocab_size=400), GENERATOR, 12_000_000)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_follow_the_number_of_distinct_words() -> None:
    command = [sys.executable, "-c", MEMORY, "bpe", "500000"]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < 150e6, f"{peak / 1e6:.0f} MB"
