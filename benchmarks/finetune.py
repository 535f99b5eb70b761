"""Fine-tuning: instructions, preferences, sentence embeddings."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from benchmarks.common import case_parser, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import clearhead as ch
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.tasks.entries.chats import PREFERENCE, SMOOTHED
from clearhead.learn.tasks.generation import chat_template, set_template
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training.events import read_log

# sft ------------------------------------------------------------------------------------------------------


FORMS = {  # what is asked for, and how it is told whether the answer has that form
    "Answer with one word only: what is the capital of {x}?": lambda text: len(text.split()) == 1,
    "How many letters has the word {x}? Answer with a number only.": lambda text: text.rstrip(".").isdigit(),
    "List three facts about {x}, one a line, each beginning with a dash.": lambda text: (
        len(text.splitlines()) == 3 and all(line.startswith("-") for line in text.splitlines())
    ),
    "Is {x} a country? Answer only yes or no.": lambda text: text.lower().rstrip(".!") in ("yes", "no"),
    'Return only JSON of the form {{"name": ...}} for {x}.': lambda text: is_object(text),
}
PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "Kenya", "Norway", "Peru", "India", "Chile")


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(re.sub(r"^```(json)?|```$", "", text).strip()), dict)
    except ValueError:
        return False


def forms(model: ch.Model, places: tuple[str, ...]) -> dict[str, float]:
    """The share of requests for a form that are followed, of each kind and of all."""
    found = {}
    for asked, fits in FORMS.items():
        texts = [
            model.chat([{"role": "user", "content": asked.format(x=place)}], 80).text for place in places
        ]
        found[asked] = sum(bool(fits((text or "").strip())) for text in texts) / len(places)
    return {**found, "all": sum(found.values()) / len(found)}


def run_sft() -> None:
    """Instruction tuning with low-rank updates, before and after, on held-out answers.

        python benchmarks/run.py sft --data ../shared/data --weights smollm2/ --device cuda --out sft.json

    `--data` holds `instructions/dolly_sample.jsonl.gz`; rows whose id is a multiple of ten are held out.
    `--weights` is the directory of a chat model, such as SmolLM2-135M-Instruct. Measured: the loss on
    held-out answers, and how often a request for a form is followed (one word, a number, a list of three
    lines, yes or no, JSON), greedy. `--tiny` takes few rows and steps, for a CPU.
    """
    parser = case_parser(run_sft, saves=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="sft-lora")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    with gzip.open(given.data / "instructions" / "dolly_sample.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    rows = rows[:60] if given.tiny else rows
    sides = {
        side: [row for row in rows if (row["id"] % 10 == 0) == (side == "held")] for side in ("train", "held")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, some in sides.items():
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        places = PLACES[:1] if given.tiny else PLACES
        settings = {
            "model.base": given.weights, "train.device": given.device, "train.seed": given.seed,
            "train.samples": 2, "data.validation": str(folder / "held.jsonl"),
            **dict(one.split("=", 1) for one in given.set),
        }  # fmt: skip
        tiny = (
            ["train.steps=2", "data.max_length=128", "data.batch_size=1", "train.samples=0"]
            if given.tiny
            else []
        )
        before = measured(
            ch.load(given.weights, dtype="float32", device=given.device), folder, places, given.tiny
        )
        print("before", before, flush=True)
        ch.train(
            folder / "train.jsonl", recipe=given.recipe, out=folder / "run",
            settings=[*(f"{key}={value}" for key, value in settings.items()), *(tiny if given.tiny else ())],
            on_event=print,
        )  # fmt: skip
        after = measured(ch.load(folder / "run", device=given.device), folder, places, given.tiny)
        print("after", after, flush=True)
        body = {
            "rows": {side: len(some) for side, some in sides.items()}, "seed": given.seed,
            "recipe": given.recipe, "before": before, "after": after, "curve": read_log(folder / "run"),
        }  # fmt: skip
        given.out.write_text(json.dumps(body, indent=2) + "\n")


def measured(model: ch.Model, folder: Path, places: tuple[str, ...], tiny: bool) -> dict[str, object]:
    plan = ch.read_recipe(None, ["data.task=chat", f"data.max_length={128 if tiny else 1024}"]).data
    judged = ch.evaluate(model, folder / "held.jsonl", plan, batch_size=2 if tiny else 8)
    loss = {
        "loss": judged.metrics["loss"],
        "interval": judged.intervals.get("loss"),
        "targets": judged.targets,
    }
    return {**loss, "forms": forms(model, places)}


# dpo ------------------------------------------------------------------------------------------------------


TINY = ("train.steps=2", "data.max_length=128", "data.batch_size=2", "train.samples=0")


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [
        {"prompt": "\n\n".join(filter(None, (row["instruction"], row.get("input")))),
         "chosen": row["chosen"], "rejected": row["rejected"]}
        for row in rows
        if row["chosen"].strip() and row["rejected"].strip() and row["chosen"] != row["rejected"]
    ]  # fmt: skip


def held(row: dict[str, str]) -> bool:
    return hashlib.sha256(row["prompt"].encode()).digest()[0] % 5 == 0


def run_dpo() -> None:
    """Preference tuning (DPO), before and after, on held-out pairs, versus "choose the longer answer".

        python benchmarks/run.py dpo --data ../shared/data --weights smollm2/ --device cuda --out dpo.json

    `--data` holds `preferences/pandalm_pairs.jsonl.gz` and `preferences/llmbar.jsonl.gz`; a fifth of
    PandaLM's instructions is held out, as is all of LLMBar, which is never trained on. `--weights` is the
    directory of a chat model. Rates: how often the chosen answer is the likelier one, as a whole, per
    token, and by the ratio to the model before training, which is what DPO learns. `--tiny` takes few rows
    and steps, for a CPU.
    """
    parser = case_parser(run_dpo, saves=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    pandalm, llmbar = (
        read(given.data / "preferences" / f"{name}.jsonl.gz") for name in ("pandalm_pairs", "llmbar")
    )
    if given.tiny:
        pandalm, llmbar = pandalm[:40], llmbar[:4]
    sides = {
        "train": [row for row in pandalm if not held(row)],
        "pandalm": [row for row in pandalm if held(row)],
        "llmbar": llmbar,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, rows in sides.items():
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        longer = {
            side: sum(len(row["chosen"]) > len(row["rejected"]) for row in sides[side]) / len(sides[side])
            for side in ("pandalm", "llmbar")
        }
        settings = [
            f"model.base={given.weights}", f"train.device={given.device}", f"train.seed={given.seed}",
            f"data.validation={folder / 'pandalm.jsonl'}", "train.metric=accuracy", *given.set,
            *(TINY if given.tiny else ()),
        ]  # fmt: skip
        before = rates(ch.load(given.weights, dtype="float32", device=given.device), folder, given.tiny)
        print("before", before, "longer", longer, flush=True)
        done = ch.train(
            folder / "train.jsonl", recipe="dpo", out=folder / "run", settings=settings, on_event=print
        )
        after = rates(ch.load(folder / "run", device=given.device), folder, given.tiny)
        print("after", after, done.metrics, flush=True)
        body = {
            "rows": {side: len(rows) for side, rows in sides.items()}, "seed": given.seed, "longer": longer,
            "before": before, "after": after, "held_out": done.metrics, "curve": read_log(folder / "run"),
        }  # fmt: skip
        given.out.write_text(json.dumps(body, indent=2) + "\n")


def rates(model: ch.Model, folder: Path, tiny: bool) -> dict[str, dict[str, float]]:
    plan = ch.read_recipe(None, ["data.task=prefer", f"data.max_length={128 if tiny else 512}"]).data
    judged = {
        side: ch.evaluate(model, folder / f"{side}.jsonl", plan, batch_size=2 if tiny else 16)
        for side in ("pandalm", "llmbar")
    }
    names = ("accuracy", "accuracy_per_token")
    return {side: {name: one.metrics[name] for name in names} for side, one in judged.items()}


# dpo_trl --------------------------------------------------------------------------------------------------


ROWS = [
    {"prompt": "hi", "chosen": "hello there", "rejected": "no"},
    {"prompt": "two", "chosen": "2", "rejected": "three and more"},
    {"prompt": "colour", "chosen": "red", "rejected": "blue"},
    {"prompt": "a longer prompt", "chosen": "yes!", "rejected": "it depends"},
]


def save_models(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=256, eos_token_id=257,
        initializer_range=0.2,
    )  # fmt: skip
    made = []
    for number, name in enumerate(("policy", "reference")):
        torch.manual_seed(number)
        made.append(LlamaForCausalLM(config).eval())
        made[-1].save_pretrained(folder / name)
        wrapped.save_pretrained(folder / name)
    return made[0], made[1], wrapped


def our_batch(folder: Path, m: ch.Model):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    set_template(m, "plain")
    task = TASKS["prefer"]
    corpus = open_corpus(DataPlan(paths=(str(path),)), task.row, split=False)
    rows = task.encode_corpus(
        corpus, "validation", m.tokenizer, (), folder / "cache", special=m.special,
        template=chat_template(m),
    )  # fmt: skip
    given = {"special": m.special, "length": 100, "seed": 0, "training": False}
    return next(iter(task.make_batches(rows, DataPlan(batch_size=4), **given).all()))


def their_inputs(batch) -> dict[str, torch.Tensor]:
    """The two documents of each row as rows of their own, chosen before rejected, padded at the right."""
    found = []
    for document in (0, 1):
        for ids, targets, documents, mask in zip(batch.ids, batch.targets, batch.documents, batch.mask):
            own = (documents == document) & mask
            last = targets[own][-1:]  # what the template writes after the answer is no target
            last = last[last != -100]
            wanted = torch.cat([torch.tensor([-100]), targets[own]])
            found.append((torch.cat([ids[own], last]), wanted[: int(own.sum()) + len(last)]))
    width = max(len(ids) for ids, _ in found)
    inputs = {
        name: torch.zeros(len(found), width, dtype=torch.long)
        for name in ("input_ids", "attention_mask", "completion_mask")
    }
    for row, (ids, wanted) in enumerate(found):
        inputs["input_ids"][row, : len(ids)] = ids
        inputs["attention_mask"][row, : len(ids)] = 1
        inputs["completion_mask"][row, : len(ids)] = (wanted != -100).long()
    return inputs


def run_dpo_trl() -> None:
    """Losses of pairs versus trl's on the same batch: python benchmarks/run.py dpo_trl (pip install trl
    first).

    A tiny Llama with random weights, another as the reference, four pairs of unequal length. Ours are
    computed from the batches that training uses, trl's by its own trainer from the same ids.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy, reference, tokenizer = save_models(folder)
        ours, theirs_reference = ch.load(folder / "policy"), ch.load(folder / "reference")
        batch = our_batch(folder, ours)
        task = TASKS["prefer"]
        with torch.no_grad():
            logprobs = task.outputs_of(ours.model, batch)
            batch.reference[:] = task.outputs_of(theirs_reference.model, batch)
        config = DPOConfig(output_dir=str(folder / "out"), report_to=[], use_cpu=True, bf16=False)
        DPOTrainer._prepare_dataset = lambda self, dataset, *given, **named: dataset  # the batch is ours
        trainer = DPOTrainer(
            policy, reference, config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer
        )
        results = []
        for kind in PREFERENCE:
            for beta, smoothing in ((0.1, 0.0), (0.5, 0.2)):
                if smoothing and kind not in SMOOTHED[1:]:
                    smoothing = 0.0
                trainer.loss_types, trainer.loss_weights, trainer.beta = [kind], [1.0], beta
                trainer.label_smoothing = smoothing or (1e-3 if kind == "exo_pair" else 0.0)
                with torch.no_grad():
                    wanted = float(trainer._compute_loss(trainer.model, their_inputs(batch), False))
                made = float(
                    task.with_values(kind=kind, beta=beta).loss(logprobs, batch, smoothing) / len(batch)
                )
                results.append(
                    {"loss": kind, "beta": beta, "smoothing": smoothing, "ours": made, "trl": wanted}
                )
                print(f"{kind:14} {beta} {smoothing}  {made:.7f}  {wanted:.7f}  {made - wanted:+.1e}")
        worst = max(abs(row["ours"] - row["trl"]) / max(1, abs(row["trl"])) for row in results)
        print(f"largest relative difference {worst:.1e}")
        save("cpu_dpo_trl", [*results, {"worst": worst}])


# embed ----------------------------------------------------------------------------------------------------


EMBED_TINY = ("train.epochs=", "train.steps=2", "data.max_length=64", "train.samples=0")


def sts(folder: Path, part: str) -> list[dict[str, object]]:
    path = folder / f"sts-{part}.csv"
    with gzip.open(f"{path}.gz", "rt") if part == "train" else path.open() as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [{"sentence1": row[5], "sentence2": row[6], "score": float(row[4])} for row in rows]


def scifact(folder: Path):
    with gzip.open(folder / "corpus.jsonl.gz", "rt") as file:
        corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in map(json.loads, file)}
    with (folder / "queries.jsonl").open() as file:
        queries = {row["_id"]: row["text"] for row in map(json.loads, file)}
    wanted: dict[str, dict[str, dict[str, float]]] = {}
    for part in ("train", "test"):
        wanted[part] = defaultdict(dict)
        with (folder / f"qrels_{part}.tsv").open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if float(row["score"]) > 0:
                    wanted[part][row["query-id"]][row["corpus-id"]] = float(row["score"])
    return corpus, queries, wanted


def spearman(vectors, rows) -> float:
    """Of cosines with scores; `vectors` is a function from texts to [N, D]."""
    one, other = (
        torch.nn.functional.normalize(torch.as_tensor(vectors([row[side] for row in rows])), dim=-1)
        for side in ("sentence1", "sentence2")
    )
    cosines = (one * other).sum(-1, keepdim=True).tolist()
    return METRICS["spearman"](cosines, [[row["score"]] for row in rows])


def retrieval(vectors, corpus, queries, wanted) -> dict[str, float]:
    names, asked = list(corpus), list(wanted)
    texts = torch.nn.functional.normalize(torch.as_tensor(vectors(list(corpus.values()))), dim=-1)
    found = torch.nn.functional.normalize(torch.as_tensor(vectors([queries[one] for one in asked])), dim=-1)
    best = (found @ texts.T).topk(min(10, len(names))).indices.tolist()
    ranked = [[names[place] for place in row] for row in best]
    return {name: METRICS[name](ranked, [wanted[one] for one in asked]) for name in ("ndcg", "mrr")}


def peer(weights: str, rows, loss: str, device: str, epochs: float, batch: int, seed: int, rate: float):
    """Train with sentence-transformers; return a function from texts to vectors, or None without it."""
    try:
        from datasets import Dataset
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
            losses,
        )
    except ImportError:
        return None
    model = SentenceTransformer(weights, device=device)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=batch, seed=seed,
        learning_rate=rate, warmup_ratio=0.05, report_to=[], save_strategy="no", bf16=device == "cuda",
        batch_sampler="no_duplicates",
    )  # fmt: skip
    SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), loss=getattr(losses, loss)(model, scale=20.0)
    ).train()
    return lambda texts: model.encode(texts, batch_size=64, show_progress_bar=False)


def run_embed() -> None:
    """A sentence embedder trained on STS Benchmark and on SciFact's training queries, before and after.

        python benchmarks/run.py embed --data ../shared/data --weights minilm/ --device cuda --out embed.json

    `--data` holds `sts_benchmark` and `scifact`, `--weights` a sentence encoder such as all-MiniLM-L6-v2.
    STS: the Spearman correlation on the test part, the best checkpoint by the dev part. SciFact: nDCG@10
    and MRR@10 of the test queries over all 5,183 abstracts; a tenth of the training queries chooses the
    checkpoint. `--peer` trains on the same rows with sentence-transformers' own trainer and losses, where
    it is installed. `--tiny` is for a CPU.
    """
    parser = case_parser(run_embed, saves=False)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-alone", action="store_true", help="ours was trained before")
    parser.add_argument("--only", choices=("sts", "scifact"), default=None)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    parts = {part: sts(given.data / "sts_benchmark", part) for part in ("train", "dev", "test")}
    corpus, queries, wanted = scifact(given.data / "scifact")
    pairs = [
        {"anchor": queries[query], "positive": corpus[document]}
        for query, found in wanted["train"].items()
        for document in found
    ]
    if given.tiny:
        parts = {part: rows[:24] for part, rows in parts.items()}
        few = list(wanted["test"])[:5]
        wanted["test"] = {query: wanted["test"][query] for query in few}
        corpus = {name: corpus[name] for found in wanted["test"].values() for name in found}
        pairs = pairs[:24]
    base, results = ch.load(given.weights, dtype="float32", device=given.device), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task, rows, more, loss in (
            ("sts", parts["train"], ["train.metric=spearman"], "CoSENTLoss"),
            ("scifact", pairs, ["train.metric=ndcg"], "MultipleNegativesRankingLoss"),
        ):
            if given.only not in (None, task):
                continue
            write(folder / f"{task}.jsonl", rows)
            batch = 8 if given.tiny else 64
            settings = [
                f"model.base={given.weights}", f"train.device={given.device}", f"train.seed={given.seed}",
                f"train.epochs={given.epochs}", f"train.lr={given.lr}", f"data.batch_size={batch}", *more,
                *(EMBED_TINY if given.tiny else ()),
            ]  # fmt: skip
            if task == "sts":
                write(folder / "dev.jsonl", parts["dev"])
                settings.append(f"data.validation={folder / 'dev.jsonl'}")
            trained = None
            if not given.peer_alone:
                place = folder / task
                ch.train(f"{place}.jsonl", recipe="embed", out=place, settings=settings, on_event=print)
                trained = ch.load(place, device=given.device)
            measure = (
                (lambda vectors: {"spearman": spearman(vectors, parts["test"])})
                if task == "sts"
                else (lambda vectors: retrieval(vectors, corpus, queries, wanted["test"]))
            )
            other = None
            if given.peer or given.peer_alone:
                other = peer(
                    given.weights, rows, loss, given.device, 1 if given.tiny else given.epochs, batch,
                    given.seed, given.lr,
                )  # fmt: skip
            results[task] = {
                "rows": len(rows), "before": measure(base.embed), "after": trained and measure(trained.embed),
                "sentence_transformers": other and measure(lambda texts, m=other: np.asarray(m(texts))),
                "curve": trained and read_log(folder / task),
            }  # fmt: skip
            print(task, {key: value for key, value in results[task].items() if key != "curve"}, flush=True)
    given.out.write_text(json.dumps({"seed": given.seed, "results": results}, indent=2) + "\n")


def write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
