"""Texts that tokenizers get wrong: a fixed list of hard cases and seeded random Unicode."""

from __future__ import annotations

import random

HARD = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\nand  double  spaces\u00a0no-break\u2003em\u3000ideographic\u200bzero-width",
    "I'll won't they've we're HE'S",
    "3,141.59 12345678 1st 2nd x²½Ⅷ①",
    "naïve café résumé cafe\u0301 re\u0301sume\u0301 A\u030a \u212b",
    "Zalgo: Z\u0351\u036b\u0343a\u0328l\u0322g\u0321o\u031f",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ ☎︎ 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "العربية مع تشكيل: مَرْحَبًا ‏RTL mark‏ עברית שלום",
    "中文字符测试 日本語テスト ｶﾀｶﾅ 한국어 조합\u1112\u1161\u11ab",
    "ไทยไม่มีช่องว่าง हिन्दी देवनागरी தமிழ்",
    "control\x00\x01\x07\x1b\x7f\x85\x9f characters\ufeff BOM \ufffd replacement \ufffe non-character",
    "ﬁligature ﬀ Ǆ ŉ İstanbul ıssız ẞ ß ΑΣ ας",
    "<s> </s> <unk> <pad> [CLS] [SEP] [MASK] <mask> <|endoftext|> <extra_id_0>",
    "▁underline ▁ Ġg ## ##ing",
    "``quoted'' “smart” ‘single’ — dash … «guillemets»",
    "supercalifragilisticexpialidocious" * 8,
    "a" * 500,
    "://www.example.com/path?query=1&other=%20#fragment user@example.org C:\\Windows\\system32",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}\n\n\n    # end\n",
    b"bytes \xff\xfe\x80 invalid \xc3( utf-8".decode("utf-8", "replace"),
    "one 🙂 two",
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer",
]
BLOCKS = [
    *[(0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF)],
    *[(0x900, 0xDFF), (0x2000, 0x206F), (0x2190, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x4FFF)],
    *[(0xAC00, 0xACFF), (0xFB00, 0xFFEF), (0x1F300, 0x1FAFF), (0x0, 0x1F)],
]
WORDS = [
    *("the", "king", "of", "England", "shall", "thou", "not", "speak"),
    *("good", "my", "lord", "what", "is", "it", "and", "to"),
]


def texts(count: int = 300, seed: int = 0) -> list[str]:
    """The hard cases and `count` random ones."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 8)):
            if rng.random() < 0.5:
                parts.append(" ".join(rng.choices(WORDS, k=rng.randint(1, 5))))
            else:
                low, high = rng.choice(BLOCKS)
                parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))))
        made.append(rng.choice(["", " ", "  ", "\n"]).join(parts))
    return HARD + made
