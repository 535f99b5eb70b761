"""Losses of pairs beside trl's on the same batch: python benchmarks/dpo_trl.py (pip install trl first).

A tiny Llama with random weights, another as the reference, four pairs of unequal length. Ours are computed
from the batches that training uses, trl's by its own trainer from the same ids.
"""

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import clearhead as ch
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.chat import chat_template, set_template
from clearhead.learn.tasks.entries.chats import PREFERENCE, SMOOTHED
from clearhead.learn.tasks.table import TASKS
from common import save

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
    corpus = open_corpus(DataPlan(paths=(str(path),)), task.shape, split=False)
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


def main() -> None:
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


if __name__ == "__main__":
    main()
