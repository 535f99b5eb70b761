"""Tool use: how often a chat model calls the right function, before and after training on generated data.

A kind of function is written by hand (`Kind`); functions are generated from it: a thing and words for the
name, the description and the parameters. Those of the test set are held out: other things, other words, and
in part other kinds (`NEW`). So are the cities, people and numbers that are asked about.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import case_parser, device_name, save

import clearhead as ch
from clearhead.hub.tokens.tools import call_function
from clearhead.learn.training.events import read_log

Message = dict[str, Any]
LENGTH = 64  # new tokens of an answer at most
NO_FUNCTION = "None of my functions can do that."

# Functions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of function: {thing} is what it is about, other names in braces are values."""

    name: str
    description: str
    questions: tuple[str, ...]
    reply: str  # in words, once {result} is there
    values: tuple[str, ...]  # kinds of values, in the order of the parameters; ?: optional, asked by OPTIONAL
    things: str
    results: str  # values of what it returns


KINDS = (  # of which things are shared out between training and test
    Kind("{look} {thing}", "{Look} the {thing} of a place.",
         ("What is the {thing} in {place}?", "Tell me the {thing} of {place}.",
          "I need the {thing} for {place}."),
         "The {thing} in {place} is {result}.", ("place",),
         "temperature humidity population altitude postcode sunrise rainfall | pollution latitude", "number"),
    Kind("{look} {thing}", "{Look} the {thing} of a person.",
         ("What is the {thing} of {person}?", "Do you have the {thing} of {person}?",
          "Find {person}'s {thing}."),
         "The {thing} of {person} is {result}.", ("person",),
         "birthday office employer nickname team landlord | salary dentist", "word"),
    Kind("{look} {thing}", "{Look} the {thing} of a product.",
         ("What is the {thing} of the {item}?", "Show me the {thing} of the {item}.",
          "{item}: which {thing}?"),
         "The {thing} of the {item} is {result}.", ("item", "currency?"),
         "price discount cost tax | fee deposit", "number"),
    Kind("set {thing}", "Set the {thing}.",
         ("Set the {thing} to {number}.", "Change the {thing} to {number}.",
          "I want the {thing} at {number}."),
         "The {thing} is set to {result}.", ("number",),
         "volume brightness heating timer fan_speed oven | thermostat treble", "number"),
    Kind("{make} {thing}", "{Make} a {thing} with a title.",
         ("Create a {thing} called {item}.", "Please add a {thing} named {item}.",
          "I need a new {thing}: {item}."),
         "The {thing} {item} is number {result}.", ("item", "day?"),
         "note task event reminder folder list | ticket playlist", "number"),
    Kind("send {thing}", "Send a {thing} to a person.",
         ("Send {person} a {thing} that says {text}.", "Write a {thing} to {person}: {text}."),
         "The {thing} to {person} is {result}.", ("person", "text"),
         "message email letter fax | postcard telegram", "word"),
    Kind("book {thing}", "Book a {thing} in a place for some people.",
         ("Book a {thing} in {place} for {number} people.", "We are {number} and need a {thing} in {place}."),
         "Your {thing} in {place} has number {result}.", ("place", "number", "day?"),
         "table room tent cabin boat | taxi studio", "number"),
    Kind("{look} {thing}", "{Look} the {thing} between two places.",
         ("What is the {thing} from {place} to {place2}?",
          "{Look} the {thing} between {place} and {place2}."),
         "The {thing} from {place} to {place2} is {result}.", ("place", "place2"),
         "distance route flight train | ferry bus", "number"),
    Kind("compute {thing}", "Compute the {thing} of two numbers.",
         ("What is the {thing} of {number} and {number2}?",
          "Work out the {thing} of {number} and {number2}."),
         "The {thing} of {number} and {number2} is {result}.", ("number", "number2"),
         "sum product difference maximum | average remainder", "number"),
    Kind("switch {thing}", "Switch the {thing} on or off.",
         ("Turn {flag} the {thing}.", "Switch the {thing} {flag}, please.", "Turn the {thing} {flag}."),
         "The {thing} is {flag} now.", ("flag",),
         "lamp alarm heater radio camera | sprinkler printer", "word"),
)  # fmt: skip
NEW = (  # held out as a whole
    Kind("translate {thing}", "Translate a {thing} into a language.",
         ("Translate the {thing} {text} into {language}.", "How do I say the {thing} {text} in {language}?"),
         "In {language} it is {result}.", ("text", "language"), "| word phrase", "word"),
    Kind("order {thing}", "Order {thing} by the number of pieces.",
         ("Order {number} {thing}.", "I would like to have {number} {thing}."),
         "{number} {thing} will come: order {result}.", ("number", "day?"), "| pizzas sandwiches", "number"),
    Kind("cancel {thing}", "Cancel the {thing} of a person.",
         ("Cancel the {thing} of {person}.", "{person} will not need the {thing}, please cancel it."),
         "The {thing} of {person} is {result}.", ("person",), "| subscription appointment", "word"),
)  # fmt: skip
SIDES = ("train", "test")


def by_side(text: str) -> tuple[list[str], ...]:
    """Return the words of the training set and those of the test set, which stand after a bar."""
    return tuple([word.strip() for word in side.split(",") if word.strip()] for side in text.split("|"))


WORDS = {  # in names of functions, and as names of parameters
    "look": by_side("get, find, show | fetch, check"),
    "make": by_side("create, add, make | open, start"),
    "place": by_side("city, town, place | location, destination"),
    "place2": by_side("to_city, end, target | arrival"),
    "person": by_side("person, name, user | contact, who"),
    "item": by_side("item, title, label | subject, article"),
    "number": by_side("number, value, count | amount, quantity"),
    "number2": by_side("other, second, b | with_number"),
    "text": by_side("text, body | content, words"),
    "flag": by_side("on, active | enabled"),
    "currency": by_side("currency | money"),
    "day": by_side("day, date | weekday"),
    "language": by_side("| language, target_language"),
}
VALUES = {
    "place": by_side(
        "Oslo, Paris, Lima, Cairo, Tokyo, Berlin, Quito, Delhi, Rome, Dakar, Perth, Seoul, Boston, Madrid |"
        "Lisbon, Nairobi, Vienna, Havana, Dublin, Hanoi, Denver, Zagreb"
    ),
    "person": by_side(
        "Anna, Omar, Lucy, Ben, Mia, Carlos, Yuki, Tom, Sara, Ivan, Nora, Ali, Emma, Paul, Zoe, Raj |"
        "Greta, Hugo, Amina, Felix, Ruth, Diego, Lena, Oscar"
    ),
    "item": by_side(
        "lamp, red chair, guitar, blue bag, kettle, tent, camera, wool hat, desk, green bike, mirror, clock |"
        "violin, black sofa, toaster, silver ring, ladder, garden table"
    ),
    "text": by_side(
        "hello, see you soon, I am late, thank you, good luck, call me back, dinner is ready, we won |"
        "good morning, the train is gone, happy birthday, where are you"
    ),
    "currency": by_side("euro, dollar, yen | pound, peso"),
    "day": by_side("Monday, Tuesday, Thursday, Sunday | Wednesday, Saturday, Friday"),
    "language": by_side("| Spanish, German, Welsh, Korean"),
    "flag": by_side("on, off | on, off"),
    "word": by_side("Harper, blue, done, Rivera, open, north | Novak, ready, silver, west"),
}
OPTIONAL = {"currency": " in {currency}", "day": " on {day}"}
# Questions that need no function, with answers to learn; those of the test set need none.
OPPOSITES = by_side("hot cold, big small, old young, fast slow, wet dry, day night, long short, hard soft")[0]
PLURALS = by_side("mouse mice, foot feet, child children, book books, man men, tooth teeth, leaf leaves")[0]
SMALL_TALK = {
    "train": [
        *((f"What is the opposite of {p.split()[0]}?", f"It is {p.split()[1]}.") for p in OPPOSITES),
        *((f"What is the plural of {p.split()[0]}?", f"It is {p.split()[1]}.") for p in PLURALS),
        ("Hello!", "Hello! How can I help you?"),
        ("Thank you.", "You are welcome."),
        ("Good evening.", "Good evening! What can I do for you?"),
        ("Who are you?", "I am an assistant."),
        ("Which color has grass?", "Grass is green."),
        ("How many legs has a dog?", "A dog has four legs."),
    ],
    "test": [
        ("What is the past tense of go?", ""),
        ("Which color has snow?", ""),
        ("Good morning!", ""),
        ("How many days has a week?", ""),
        ("Thanks for your help.", ""),
        ("What does a cow eat?", ""),
        ("Tell me a joke.", ""),
        ("Is the sun a star?", ""),
    ],
}


@dataclass(frozen=True)
class Case:
    """A question with the tools that are offered, the call that answers it, and what follows."""

    tools: list[dict[str, Any]]
    question: str
    name: str | None  # of the function to call; None: the answer is in words
    arguments: dict[str, Any]
    result: str  # of the call
    reply: str
    group: str  # what is counted apart

    @property
    def asked(self) -> list[Message]:
        """The conversation before the answer."""
        return [{"role": "user", "content": self.question}]

    @property
    def called(self) -> list[Message]:
        """The conversation with the right call and its result."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": "call_1", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*self.asked, answer, {"role": "tool", "tool_call_id": "call_1", "content": self.result}]

    def row(self, replied: bool) -> dict[str, Any]:
        """The conversation to learn from; with the result of the call, if `replied`."""
        messages = self.asked if self.name is None else self.called[: 3 if replied else 2]
        last = [{"role": "assistant", "content": self.reply}] if self.name is None or replied else []
        return {"messages": [*messages, *last], "tools": self.tools}


def worded(template: str, values: dict[str, Any]) -> str:
    """Return a template with its values, as a sentence: a capital first, an before a vowel."""
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", template.format(**values))
    return text[:1].upper() + text[1:]


class Generator:
    """Draws cases of one side, train or test."""

    def __init__(self, side: str, seed: int) -> None:
        self.side, self.number = side, SIDES.index(side)
        self.draw = random.Random(f"{side} {seed}")
        kinds = KINDS if side == "train" else (*KINDS, *NEW)
        self.kinds = [(kind, thing) for kind in kinds for thing in self._things(kind)]

    def _things(self, kind: Kind) -> list[str]:
        return kind.things.split("|")[self.number].split()

    def function(self, kind: Kind, thing: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a tool of a kind as OpenAI's API has it, and the names of its parameters by their values."""
        draw = self.draw
        words = {name: draw.choice(WORDS[name][self.number]) for name in ("look", "make")}
        upper = {name.capitalize(): word.capitalize() for name, word in words.items()}
        plain = thing.replace("_", " ")
        name = kind.name.format(thing=thing, **words).replace(" ", "_")
        names: dict[str, str] = {}
        properties: dict[str, Any] = {}
        for value in kind.values:
            key = value.rstrip("?")
            names[key] = draw.choice(WORDS[key][self.number])
            types = {"number": "integer", "number2": "integer", "flag": "boolean"}
            properties[names[key]] = {"type": types.get(key, "string")}
        required = [names[value] for value in kind.values if not value.endswith("?")]
        parameters = {"type": "object", "properties": properties, "required": required}
        described = worded(kind.description, {"thing": plain, **words, **upper})
        entry = {"name": name, "description": described, "parameters": parameters}
        return {"type": "function", "function": entry}, names

    def value(self, key: str) -> Any:
        """Return a value of a kind."""
        if key.startswith("number"):  # other numbers in the test set
            return 2 * self.draw.randint(1, 45) + self.number
        return self.draw.choice(VALUES[key.rstrip("2")][self.number])

    def case(self, most: int) -> Case:
        """Return a case with 2 to `most` tools: three of four need a call."""
        draw, count = self.draw, self.draw.randint(2, most)
        chosen: list[tuple[Kind, str]] = []
        for kind, thing in draw.sample(self.kinds, len(self.kinds)):  # no two that would answer alike
            if all(thing != other for _, other in chosen) and len(chosen) <= count:
                chosen.append((kind, thing))
        (kind, thing), *others = chosen
        tools = [self.function(*other)[0] for other in others[: count - 1]]
        kind_of_case = draw.random()
        if kind_of_case < 0.12:
            question, reply = draw.choice(SMALL_TALK[self.side])
            tools.append(self.function(*others[-1])[0])
            return Case(tools, question, None, {}, "", reply, "small talk")
        tool, names = self.function(kind, thing)
        values = {value.rstrip("?"): self.value(value.rstrip("?")) for value in kind.values}
        while "place2" in values and values["place2"] == values["place"]:
            values["place2"] = self.value("place2")
        left = [value[:-1] for value in kind.values if value.endswith("?") and draw.random() < 0.5]
        question = draw.choice(kind.questions)
        for value in kind.values:
            if value.endswith("?") and value[:-1] not in left:
                question = question[:-1] + OPTIONAL[value[:-1]] + question[-1]
        result = str(self.value(kind.results))
        word = draw.choice(WORDS["look"][self.number]).capitalize()
        filled = {**values, "thing": thing.replace("_", " "), "result": result, "Look": word}
        if kind.name.startswith("set"):
            filled["result"] = result = str(values["number"])
        question = worded(question, filled)
        if kind_of_case < 0.24:  # the function that would answer is not offered
            tools.append(self.function(*others[-1])[0])
            return Case(tools, question, None, {}, "", NO_FUNCTION, "no such function")
        arguments = {names[key]: value for key, value in values.items() if key not in left}
        if "flag" in values:
            arguments[names["flag"]] = values["flag"] == "on"
            result = values["flag"]
        tools.insert(draw.randint(0, len(tools)), tool)
        group = "new kinds" if kind in NEW else "known kinds"
        name = tool["function"]["name"]
        return Case(tools, question, name, arguments, result, worded(kind.reply, filled), group)


# Measuring --------------------------------------------------------------------------------------------------


def fits(arguments: Any, tool: dict[str, Any]) -> bool:
    """Whether arguments are of a tool's schema, as far as these tools go."""
    known = tool["function"]["parameters"]
    types = {"string": str, "integer": int, "boolean": bool}
    return (
        isinstance(arguments, dict)
        and {*known["required"]} <= {*arguments} <= {*known["properties"]}
        and all(type(value) is types[known["properties"][name]["type"]] for name, value in arguments.items())
    )


def parsed(text: str) -> Any:
    """Return the value of a text in JSON; None where it was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def same(one: Any, other: Any) -> bool:
    """Whether two arguments mean the same: case, an end mark and white space around a text do not count."""
    texts = isinstance(one, str) and isinstance(other, str)
    return one.strip(" .!?").casefold() == other.strip(" .!?").casefold() if texts else one == other


def judged(model: ch.Model, case: Case, choice: str) -> dict[str, Any]:
    """Answer a question; return what is right of the answer."""
    options = {"tools": case.tools, "tool_choice": choice, "parallel_tool_calls": False, "reuse": True}
    answer = model.chat(case.asked, LENGTH, **options)
    found: dict[str, Any] = {"called": bool(answer.tool_calls), "text": answer.message["content"]}
    if answer.tool_calls:
        (call,) = answer.tool_calls
        offered = {tool["function"]["name"]: tool for tool in case.tools}
        arguments = parsed(call.arguments)
        found |= {"name": call.name, "arguments": call.arguments}
        found["parses"] = call.name in offered and fits(arguments, offered[call.name])
        found["function"] = call.name == case.name
        found["right"] = (
            found["function"]
            and found["parses"]
            and arguments.keys() == case.arguments.keys()
            and all(same(value, case.arguments[name]) for name, value in arguments.items())
        )
    return found


def share(found: Sequence[bool]) -> str:
    """How many are right, of how many."""
    return f"{sum(found)} of {len(found)}" + (f" ({sum(found) / len(found):.0%})" if found else "")


def measured(model: ch.Model, cases: Sequence[Case]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return shares of right calls with tool_choice auto and required, and every answer."""
    needed, plain = [c for c in cases if c.name], [c for c in cases if not c.name]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for choice in ("auto", "required"):
        answers = [judged(model, case, choice) for case in needed]
        rows += [
            {"question": case.question, "wanted": [case.name, case.arguments], "choice": choice, **one}
            for case, one in zip(needed, answers)
        ]
        calls = [answer for answer in answers if answer["called"]]
        summary[choice] = {
            "called": share([answer["called"] for answer in answers]),
            "parses, of calls": share([call["parses"] for call in calls]),
            "right function": share([answer.get("function", False) for answer in answers]),
            "right function and arguments": share([answer.get("right", False) for answer in answers]),
        }
        for group in ("known kinds", "new kinds"):
            own = [one.get("right", False) for case, one in zip(needed, answers) if case.group == group]
            summary[choice][f"right, {group}"] = share(own)
    for group in ("small talk", "no such function"):
        own = [case for case in plain if case.group == group]
        answers = [judged(model, case, "auto") for case in own]
        summary["auto"][f"no call, {group}"] = share([not answer["called"] for answer in answers])
        rows += [{"question": c.question, "wanted": None, **one} for c, one in zip(own, answers)]
    told = []
    for case in needed:
        text = model.chat(case.called, LENGTH, tools=case.tools).message["content"] or ""
        told.append(case.result.casefold() in text.casefold())
        rows.append({"question": case.question, "result": case.result, "text": text})
    summary["the answer names the result"] = share(told)
    return summary, rows


# A round with functions that are really run -----------------------------------------------------------------

RIVERS = {"nile": 6650, "danube": 2850, "amazon": 6400}


def river_length(river: str) -> str:
    """Fetch the length of a river."""
    return f"{RIVERS[river.casefold().removesuffix(' river')]} km"


def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


FUNCTIONS = {function.__name__: function for function in (river_length, multiply)}
ASKED = ("What is the length of the Danube?", "Multiply 37 by 21.", "How many days has a week?")


def rounds(model: ch.Model) -> list[list[Message]]:
    """Ask, run what is called, and let the model answer in words; return the conversations."""
    talks = []
    for question in ASKED:
        talk: list[Message] = [{"role": "user", "content": question}]
        for _ in range(3):
            answer = model.chat(talk, LENGTH, tools=[*FUNCTIONS.values()], parallel_tool_calls=False)
            talk.append(answer.message)
            for call in answer.tool_calls:
                result = call_function(FUNCTIONS[call.name], call.arguments)
                talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not answer.tool_calls:
                break
        for message in talk:
            called = [one["function"] for one in message.get("tool_calls") or ()]
            print(f"  {message['role']:>9}: {message['content'] or ''}", *called, flush=True)
        talks.append(talk)
    return talks


def run_tools() -> None:
    """Calls of held-out functions before and after training a chat model on generated ones.

        python benchmarks/run.py tools --weights smollm2/ --device cuda --rows 4000 --questions 400 --tools 4

    `--weights` is the directory of a chat model, such as SmolLM2-135M-Instruct. The functions, questions and
    right calls are generated with `--seed`; those of the test set are held out. Measured, greedy: how often
    the right function is called, with the right arguments, and how often none where none is needed; with
    tool_choice auto and required. Then some questions are asked with Python functions that are really run.
    `--tiny` takes few rows and steps. Every answer goes to `--out`, a summary to results/ with `--save`.
    """
    parser = case_parser(run_tools)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--tools", type=int, default=2, help="offered at most; two at least")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--recipe", default="sft-lora")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="every answer, before and after")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    rows, questions = (20, 4) if given.tiny else (given.rows, given.questions)
    train, test = Generator("train", given.seed), Generator("test", given.seed)
    talks = [train.case(given.tools).row(train.draw.random() < 0.4) for _ in range(rows)]
    cases = [test.case(given.tools) for _ in range(questions)]
    start = time.perf_counter()
    base = ch.load(given.weights, dtype="float32", device=given.device)
    before, answers = measured(base, cases)
    print("before", json.dumps(before, indent=1), flush=True)
    print("rounds before", flush=True)
    body: dict[str, Any] = {"before": before, "rounds_before": rounds(base)}
    del base
    kept = {"before": answers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, some in (("train", talks[rows // 20 :]), ("held", talks[: rows // 20])):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some)
            (folder / f"{side}.jsonl").write_text(lines, encoding="utf-8")
        settings = [
            f"model.base={given.weights}", f"train.device={given.device}", f"train.seed={given.seed}",
            f"train.epochs={given.epochs}", f"data.validation={folder / 'held.jsonl'}", "train.samples=0",
            *given.set, *(("train.epochs=", "train.steps=2") if given.tiny else ()),
        ]  # fmt: skip
        began = time.perf_counter()
        ch.train(
            folder / "train.jsonl", recipe=given.recipe, out=folder / "run", settings=settings, on_event=print
        )
        took = time.perf_counter() - began
        tuned = ch.load(folder / "run", device=given.device)
        after, kept["after"] = measured(tuned, cases)
        print("after", json.dumps(after, indent=1), flush=True)
        print("rounds after", flush=True)
        body |= {"after": after, "rounds_after": rounds(tuned), "curve": read_log(folder / "run")}
    groups = [case.group for case in cases]
    about = {
        "device": device_name(), "seed": given.seed, "recipe": given.recipe, "settings": given.set,
        "training_rows": len(talks) - rows // 20, "validation_rows": rows // 20,
        "functions": {side: len(one.kinds) for side, one in (("train", train), ("test", test))},
        "test_questions": {group: groups.count(group) for group in sorted({*groups})},
        "training_s": round(took), "whole_s": round(time.perf_counter() - start),
    }  # fmt: skip
    if given.out:
        given.out.write_text(json.dumps({**about, **body, "answers": kept}, indent=2) + "\n")
    if given.save:
        save("tools_smollm2", [{**about, **body}])


def run_tool_schemas() -> None:
    """Calls of 200 tools with random schemas, in the formats of five models: how many parse and validate.

        python benchmarks/run.py tool_schemas [--save]

    A model of random weights, which would write anything, must call each tool at temperature 1.
    """
    from tests.serve import test_tools

    m, results = test_tools.random_model(), []
    for name in test_tools.FORMATS:
        counts = dict.fromkeys(("calls", "parse", "validate"), 0)
        for tool, answer in test_tools.random_calls(m, name):
            counts["calls"] += [call.name for call in answer.tool_calls] == [tool.name]
            arguments = parsed(answer.tool_calls[0].arguments) if answer.tool_calls else None
            counts["parse"] += arguments is not None
            counts["validate"] += arguments is not None and test_tools.fits(arguments, tool.schema)
        results.append({"format": name, "tools": test_tools.EACH, **counts})
        print(results[-1], flush=True)
    if "--save" in sys.argv:
        totals = {key: sum(row[key] for row in results) for key in ("tools", "calls", "parse", "validate")}
        save("tool_schemas", [{"device": device_name(), **totals, "formats": results}])
