"""Chat templates: ids as transformers gives them, spans that the assistant wrote, a sandbox that holds."""

import time

import pytest
import transformers
from rich.cells import cell_len
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import clearhead as ch
from clearhead.app.commands.chat import Printed
from clearhead.errors import InputError
from clearhead.hub.tokens import chat
from clearhead.hub.tokens.chat import KNOWN, ChatTemplate
from clearhead.hub.tokens.tools import without_tools
from clearhead.learn.tasks.generation import chat_ids, turn_end
from tests import harness
from tests.tokens.toys import TEMPLATES

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = harness.split("<s> </s> <|im_start|> <|im_end|> <|eot_id|> <|end|> <end_of_turn> <|return|>")
HI = {"role": "user", "content": " Hi, wie geht’s?\n"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CHATS = {
    "one": [HI],
    "two turns": [HI, {"role": "assistant", "content": "Good. "}, {"role": "user", "content": "{{ 7 * 7 }}"}],
    "system": [{"role": "system", "content": "Be brief."}, HI],
    "thought": [HI, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWell."}, HI],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
    "ended": [HI, {"role": "assistant", "content": "Bye."}],
    "tools": [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain"},
    ],
    "reasons": [HI, {"role": "assistant", "content": "Well.", "reasoning": "hm"}, HI],
}
# Fields that a template must name to be given them: transformers drops the others without a word.
READS = {
    "tools": lambda text: "tool_calls" in text and "tools" in text,
    "reasons": lambda text: "hinking" in text or "</think>" in text,  # the latter leave thoughts out
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes as GPT-2 writes them, without merges, and some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


@pytest.fixture(scope="module")
def model(tokenizer) -> ch.Model:
    made = harness.build(vocab_size=300, positions="rope", max_positions=2048)
    return ch.Model(made, tokenizer, special={"bos": 256, "eos": 257})


def test_there_are_thirty_templates():
    assert len(TEMPLATES) == len(set(TEMPLATES.values())) >= 30


def takes_system(tokenizer: transformers.PreTrainedTokenizerFast, template: str) -> bool:
    """Whether a template writes what a system message says."""
    messages = [{"role": "system", "content": "Brief."}, HI]
    try:
        return "Brief." in tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:
        return False


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_equal_those_of_transformers(name, model, tokenizer):
    """Every conversation that transformers takes gives the same ids; what it refuses is refused in a line."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    model.settings = {**NAMES, "chat_template": TEMPLATES[name]}
    taken = 0
    for kind, messages in CHATS.items():
        more = {"tools": [TOOL]} if kind == "tools" else {}
        joins = kind == "parts" and "text" not in TEMPLATES[name]  # it takes no parts: ours are joined
        given = [{"role": "user", "content": "a b"}] if joins else messages
        if kind == "tools" and not READS[kind](TEMPLATES[name]):  # it knows of no tools: they are text
            given, more = without_tools(messages, [TOOL], takes_system(theirs, TEMPLATES[name])), {}
        if kind == "tools" and name == "deepseek_tools":  # it joins arguments to a text
            function = {**CALL["function"], "arguments": '{"city": "Köln"}'}
            given = [HI, {**messages[1], "tool_calls": [{**CALL, "function": function}]}, messages[2]]
        try:
            wanted = theirs.apply_chat_template(
                given, chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=False, **more
            )
        except Exception:
            with pytest.raises(InputError, match="chat template"):
                chat_ids(model, messages, more)
            continue
        if kind == "tools":
            more = {"tools": [TOOL]}
            assert chat_ids(model, messages, more) == list(wanted)
            continue
        if not READS.get(kind, bool)(TEMPLATES[name]):
            with pytest.raises(InputError, match=r"is not read by|does not take"):
                chat_ids(model, messages, more)
            continue
        assert chat_ids(model, messages, more) == list(wanted), kind
        taken += 1
    assert taken >= 3
    for kind in ("one", "two turns", "ended"):  # and without the generation prompt
        wanted = theirs.apply_chat_template(CHATS[kind], chat_template=TEMPLATES[name], tokenize=False)
        assert ChatTemplate(TEMPLATES[name], NAMES).render(CHATS[kind], False) == wanted


LEARNED = [  # template, and what the assistant wrote in the two turns of `TALK`, to the end of each
    ("chatml", ["one two<|im_end|>\n", "three<|im_end|>\n"]),
    ("chatml_marked", ["one two<|im_end|>", "three<|im_end|>"]),
    ("llama2", [" one two </s>", " three </s>"]),
    ("llama3", ["one two<|eot_id|>", "three<|eot_id|>"]),
    ("mistral", ["one two</s>", "three</s>"]),
    ("zephyr", ["one two</s>\n", "three</s>\n"]),
    ("vicuna", [" one two</s>", " three</s>"]),
    ("falcon", [" one two", " three"]),
    ("marked_turns", [" one two</s>", " three</s>"]),
    ("qwen3", ["<think>\n\n</think>\n\none two<|im_end|>\n", "<think>\n\n</think>\n\nthree<|im_end|>\n"]),
    ("olmo", ["one two</s>", "three</s>"]),
    ("deepseek", ["one two</s>", "three</s>"]),
]
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one two"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "three"},
]


@pytest.mark.parametrize(("name", "wanted"), LEARNED, ids=[name for name, _ in LEARNED])
def test_what_the_assistant_wrote(name, wanted):
    texts = ChatTemplate(TEMPLATES[name], NAMES).learned(TALK)
    assert [text[span.first : span.last] for text, spans in texts for span in spans] == wanted
    # Where earlier turns change once others follow, each answer has a text of its own, as it is generated.
    assert len(texts) == (2 if name == "qwen3" else 1)


def test_answers_to_nothing_and_of_weight_0_are_not_learned():
    template = ChatTemplate(KNOWN["chatml"])
    greeting = [{"role": "assistant", "content": "Hello"}, *TALK]
    ((text, spans),) = template.learned(greeting)
    assert [text[span.first : span.last] for span in spans] == ["one two<|im_end|>\n", "three<|im_end|>\n"]
    light = [{**one, "weight": 0} if one["content"] == "three" else one for one in TALK]
    assert len(template.learned(light)[0][1]) == 1
    assert template.learned(TALK[:1]) == template.learned(greeting[:1]) == []


ESCAPES = [
    *("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    *(
        "{{ messages.__class__.__base__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
    ),
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    *("{% set x = messages.append(1) %}", "{% set ns = namespace(x=0) %}{% set ns._x = 1 %}"),
    *("{% for x in range(10 ** 9) %}{% endfor %}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}"),
    *("{{ 1 // 0 }}", "{{ messages[0]['content']['x']['y'] }}", "{%", "{{"),
]

EMPTY = [
    *("{{ ''|attr('__class__') }}", "{{ '%s'|format(''.__class__) }}"),
    *("{{ raise_exception.__globals__ }}", "{{ strftime_now.__code__ }}"),
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_hostile_template_is_one_line(template):
    with pytest.raises(InputError, match=r"the chat template refuses these messages: [^\n]+$"):
        ChatTemplate(template).render([HI])


def test_what_a_sandbox_hides_is_empty():
    assert [ChatTemplate(template).render([HI]) for template in EMPTY] == [""] * len(EMPTY)


def test_a_model_answers_until_the_turn_ends(model, tokenizer, monkeypatch):
    model.settings = {**NAMES, "chat_template": TEMPLATES["llama3"]}
    assert turn_end(model) == tokenizer.token_to_id("<|eot_id|>")
    streamed: list[str] = []
    made = model.chat([HI], 24, temperature=1.0, seed=3, on_text=lambda row, new: streamed.append(new))
    whole = model.generate(
        chat_ids(model, [HI], {}), 24, temperature=1.0, seed=3, stop_tokens=("<|eot_id|>",)
    )
    assert (made.ids, made.text) == (whole.ids, whole.text) and made.text == "".join(streamed)
    model.settings = {}
    with pytest.raises(InputError, match="no chat template"):
        model.chat([HI])


def test_lines_of_a_terminal_break_between_words(capsys):
    text = "Wo steht  der Graureiher?\n\n    Am Teich, 長い鳥 auch am Fluss: Donaudampfschifffahrt! Gut."
    shown = []
    for size in (1, 3, len(text)):
        out = Printed(16)
        for start in range(0, len(text), size):
            out.add(text[start : start + size])
        out.end()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] and shown[0].split() == text.split()
    lines = shown[0].splitlines()
    assert lines[:3] == ["Wo steht  der", "Graureiher?", ""] and lines[3].startswith("    Am")
    assert all(cell_len(line) <= 16 for line in lines if line != "Donaudampfschifffahrt!")
    out = Printed(None)
    out.add(text)
    assert capsys.readouterr().out == text


LOOP, DONE = "{% for a in range(90000) %}", "{% endfor %}"
GROW = "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = "
ENDLESS = {
    "loops in loops": LOOP * 3 + "x" + DONE * 3,
    "loops that write nothing": LOOP * 3 + DONE * 3,
    "a long body": LOOP + "{% if a == 1 and a != 2 %}{% endif %}" * 900 + DONE,
    "loops that choose nothing": "{% for a in range(90000) if a < 0 %}{% endfor %}" * 900,
    "a recursive loop": "{% for a in range(90000) recursive %}{% if loop.depth < 4 %}{{ loop(range(90000)) }}"
    "{% endif %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": LOOP + "{{ range(90000) | map('string') | join | length }}" + DONE,
    "attributes": LOOP + "{{ range(90000) | map(attribute='x') | list | length }}" + DONE,
    "tests": LOOP + "{{ range(90000) | select('none') | list }}" + DONE,
    "sums": LOOP + "{{ range(90000) | sum }}" + DONE,
    "comparisons": "{% set x = 'a' * 9000000 %}" + LOOP + "{{ (x ~ a) in (x ~ 'b') }}" + DONE,
    "slices": "{% set x = 'a' * 9000000 %}" + LOOP + "{% set y = x[1:] %}" + DONE,
    "output": "{% set x = 'a' * 9000000 %}" + LOOP + "{{ x }}" + DONE,
    "a block": "{% set x = 'a' * 9000000 %}{% set y %}" + LOOP + "{{ x }}" + DONE + "{% endset %}",
    "a + a": GROW + "n.x + n.x %}{% endfor %}",
    "a ~ a": GROW + "n.x ~ n.x %}{% endfor %}",
    "[a, a]": GROW + "[n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a * a": GROW.replace("'ab'", "999") + "n.x * n.x %}{% endfor %}",
    "joined": GROW + "[n.x, n.x] | join %}{% endfor %}",
    "replaced": GROW + "n.x | replace('a', n.x) %}{% endfor %}",
    "replaced by a method": GROW + "n.x.replace('a', n.x) %}{% endfor %}",
    "formatted": GROW + "'%s%s' % (n.x, n.x) %}{% endfor %}",
    "'a' * 10**9": "{{ 'a' * 10 ** 9 }}",
    "[0] * 10**9": "{{ [0] * 10 ** 9 }}",
    "10 ** 10**9": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": "{{ ((9 ** 60) ** 60) ** 60 }}",
    "%": "{{ '%999999999d' % 1 }}",
    "% *": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format of a width": "{{ '{:{}}'.format(1, 999999999) }}",
    **{name: f"{{{{ 'a'.{name}(999999999) }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    "tabs": "{{ '\\t'.expandtabs(999999999) }}",
    **{f"| {one}": f"{{{{ 'a' | {one} }}}}" for one in ("center(999999999)", "indent(999999999, true)")},
    **{
        f"| {one}": f"{{{{ ['a'] | {one} }}}}"
        for one in ("batch(999999999, 'x') | list", "tojson(indent=999999999)")
    },
    "| slice": "{{ ['a'] | slice(999999999) | list }}",
    "| round": "{{ 1 | round(99999999, 'ceil') }}",
    "lipsum": "{{ lipsum(n=999999999) }}",
    "the counter itself": LOOP * 2 + "{{ [-99999] | map('counted steps') | list }}" + DONE * 2,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_run_for_ever_is_refused_within_a_second(name, monkeypatch):
    """The bound is a number of steps: no clock decides, and the same templates are refused everywhere."""
    if name not in ("loops in loops", "filters", "replaced"):  # the others with a tenth of the steps
        monkeypatch.setattr(chat, "WORK", chat.WORK // 10)
    start = time.process_time()
    with pytest.raises(InputError, match="the chat template refuses these messages: "):
        ChatTemplate(ENDLESS[name]).render([{"role": "user", "content": "x"}])
    assert time.process_time() - start < 5  # about one, on a machine that is not shared


def test_a_long_conversation_is_far_from_the_bound():
    """2,000 long messages in a template that looks at all of them for each."""
    source = (
        "{% for m in messages %}"
        "{% if loop.index0 == messages | length - 1 or m.role != messages[0]['role'] %}"
        "{{ '<' ~ m['role'] + '>' + m.content | trim ~ '\n' }}{% endif %}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    chat = [{"role": ("user", "assistant")[n % 2], "content": f" {n} " * 500} for n in range(2000)]
    wanted = "".join(f"<assistant>{one['content'].strip()}\n" for one in chat[1::2])
    assert ChatTemplate(source).render(chat) == f"{wanted}1000"
