"""Interventions on one run, and what its parts, neurons, features, words and directions are worth, as JSON.

Interventions on every single part take many passes: the page begins them as jobs and asks how far they are.
Features are nodes of the page's graph, and are named by their examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from clearhead.app.explorer.findings import own_texts
from clearhead.app.explorer.views import PageRun, packed_floats, short
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.hub.tokens.text import labels
from clearhead.inside.ablation import How, effect, effect_of_each
from clearhead.inside.attribution import occlusion
from clearhead.inside.direct_effects import GraphEdge
from clearhead.inside.features.dictionary import WEIGHTS, Dictionary, load
from clearhead.inside.features.report import show_features
from clearhead.inside.geometry import neighbours, projection, similarity
from clearhead.inside.graph import graph, refuse_unfit, without_edges
from clearhead.inside.inputs import choices_of, find_column, prepare
from clearhead.inside.interventions import Values, single_parts, steering, steering_vector
from clearhead.inside.logit_attribution import firing
from clearhead.inside.memories import ReadCorpus, read_corpus
from clearhead.inside.patch import patch
from clearhead.inside.results import plain
from clearhead.inside.story import estimated_effects, explain
from clearhead.learn.tasks.generation import asked_for
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.run.api import Model
from clearhead.run.generate.diffusion import Denoiser
from clearhead.run.generate.sequence import Prompts, Sampler
from clearhead.variants.kinds import denoises

LISTED = 12  # of the likeliest choices, before and after
NEURONS = 8  # that are listed
FIRST_GROUP = 4  # parts that are tried before any other is shown
GROUP_TOKENS = 1536  # of the parts that are tried in one go
FIRED = 3  # contexts that are shown of each
WRITTEN = 24  # tokens of a steered text
GRAPH_NODES = 40
GRAPH_EDGES = 150
GRAPH_CANDIDATES = 150
NEAR = 24  # tokens around the chosen one on the map
CHOICES = 5  # of a steered answer


def ablated(
    run: PageRun,
    heads: list[str],
    layers: list[str],
    feedforwards: list[str],
    how: str,
    position: int,
    second: PageRun | None = None,
) -> dict[str, Any]:
    """Return the scores at one position with parts of the model off, next to those of the whole model.

    How they are off: "zero", "mean", or "second": what they give is taken from the run of a second text.
    """
    kind: Any = "mean" if how == "second" else how
    means = _activations(run, second) if how == "second" else None
    where: dict[str, Any] = {"target": run.target, "pair": run.pair, "position": position}
    seen = effect(run.m, run.given, heads, layers, feedforwards, kind, means, **where, top=LISTED)
    before, after = seen.before.softmax(-1).tolist(), seen.after.softmax(-1).tolist()
    rows = [
        {"id": choice.id, "label": choice.label, "before": before[choice.id], "after": after[choice.id]}
        for choice in seen.top
    ]
    return {"ablated": list(seen.ablated), "how": how, "kl": seen.kl, "position": position, "rows": rows}


def _activations(run: PageRun, second: PageRun | None) -> Values:
    """Return what every part gives in the run of a second text, which `effect` puts at the same tokens."""
    if second is None:
        raise InputError("there is no second text to take anything from: give one")
    _same_model(run, second)
    other = prepare(second.m, second.given, run.target, second.pair)
    for ours, theirs in (
        (run.prepared.first_tokens, other.first_tokens),
        (run.prepared.tokens, other.tokens),
    ):
        refuse(
            len(ours) != len(theirs),
            f"the texts have {len(ours)} and {len(theirs)} tokens: to take something from the second, "
            "give texts of equal length",
        )
    taps = (
        "*.z",
        "*.attention.out",
        "*.feedforward.out",
        *(["*.cross.out"] if run.m.config.main.cross else []),
    )
    return other.record(*taps)[1]


def _same_model(run: PageRun, second: PageRun) -> None:
    refuse(
        run.m is not second.m, "the second text was read by another model: nothing of it fits into this one"
    )


def effects(run: PageRun, how: How, position: int = -1) -> dict[str, Any]:
    """Return what the model says at one position without each of its parts alone; probabilities by id.

    Parts are tried in groups, those that promise most first; each group is told once it is there.
    """
    names, column = list(single_parts(run.m.config)), find_column(position, run.choices.columns)
    known = run.removed_at(column) if how == "zero" else None
    groups = _groups(run, names, column, {} if known is None else known)
    body: dict[str, Any] = {"position": position, "how": how, "labels": {}, "before": {}, "parts": {}}
    done = 0
    for group in groups:
        each = effect_of_each(
            run.m, run.prepared, how, position=position, top=LISTED, parts=group, known=known
        )
        for name, seen in each.effects.items():
            body["labels"] |= {choice.id: choice.label for choice in seen.top}
            body["before"] |= {choice.id: short(choice.before) for choice in seen.top}
            after = {choice.id: short(choice.after) for choice in seen.top}
            body["parts"][name] = {"says": seen.ablated[0], "kl": short(seen.kl), "after": after}
        done += len(group)
        run.progress(done, len(names), {**body, "parts": dict(body["parts"])})
    return {**body, "parts": {name: body["parts"][name] for name in names}}


def _groups(run: PageRun, names: list[str], column: int, known: Collection[str]) -> list[list[str]]:
    """Return the parts in groups, the first ones small: those that are known, or have the largest gradient ×
    activation, then those of late layers, whose passes are shortest.
    """
    count = max(8, GROUP_TOKENS // max(len(run.prepared.tokens), len(run.prepared.source_tokens or ())))
    if len(names) <= count:
        return [names]
    first = [name for name in names if name in known]
    worth = {} if first else estimated_effects(run.prepared, column, int(run.scores(column).argmax()))
    first += sorted(worth, key=lambda name: -abs(worth[name]))[:FIRST_GROUP]
    others = [name for name in names if name not in set(first)]
    others.sort(key=lambda name: -int(name.rpartition(":")[2].removeprefix("encoder.").split(".")[-2:][0]))
    groups, size = [first], FIRST_GROUP
    while others:
        groups.append(others[:size])
        others, size = others[size:], min(2 * size, count)
    return groups


def story(run: PageRun, position: int = -1, token: int | None = None) -> dict[str, Any]:
    """Return which parts an answer rests on, in a sentence; candidates are removed one by one.

    Where a feed-forward leads and has a dictionary, its strongest feature at the answer's token is named.
    """
    column = find_column(position, run.choices.columns)
    kept = {"known": run.removed_at(column), "on_progress": run.progress}
    told = explain(run.m, run.prepared, token, position, **kept)  # type: ignore[arg-type]
    by_token = len(run.choices.columns) == len(run.prepared.tokens)
    feature = strongest_feature(run, told.effects[0].name, told.column) if by_token else None
    return told.to_dict() | {"feature": feature}


def patches(
    run: PageRun,
    second: str,
    part: str,
    position: int = -1,
    token: int | None = None,
    against: int | None = None,
) -> dict[str, Any]:
    """Return what each activation of this run brings back of its answer in the run of a second text."""
    other = run.others(second)
    _same_model(run, other)
    refuse(
        run.pair is not None or other.pair is not None, "patching reads one text, not a pair: run each alone"
    )
    options: dict[str, Any] = {"parts": (part,), "position": position, "target": run.target}
    patching = patch(run.m, run.given, other.given, token, against, **options, on_progress=run.progress)
    return patching.to_dict()


def occluded(run: PageRun, position: int = -1, token: int | None = None) -> dict[str, Any]:
    """Return what each word or patch is worth to one choice."""
    return dict(plain(occlusion(run.m, run.prepared, token, position)))


def similar(run: PageRun) -> dict[str, Any]:
    """Return how alike the two texts of a run are; each is read by itself."""
    refuse(not isinstance(run.given, str) or run.pair is None, "give a second text to compare this one with")
    likeness = similarity(run.m, run.given, str(run.pair))
    return {
        "cosine": likeness.cosine,
        "tokens": plain(likeness.tokens),
        "states": packed_floats(likeness.states),
    }


def graph_of(
    run: PageRun,
    position: int = -1,
    token: int | None = None,
    against: int | None = None,
    neurons: int = 0,
    scores: int = 0,
) -> dict[str, Any]:
    """Return the attribution graph of one choice.

    With `neurons` feed-forwards are taken apart, with `scores` it has what made heads look, too. Edges come
    in an order in which the first so many always lead to the choice, the most influential first.
    """
    options: dict[str, Any] = {"neurons": neurons > 0, "scores": scores > 0, "nodes": GRAPH_NODES}
    options["features"] = run.features()
    options |= {"candidates": GRAPH_CANDIDATES, "on_progress": run.progress}
    traced = graph(run.m, run.prepared, token, position, against=against, **options)
    edges = _from_the_answer(list(traced.edges))[:GRAPH_EDGES]
    ends = {"logit"}.union(*({edge.source, edge.target} for edge in edges))
    nodes = [node for node in traced.nodes if node.id in ends]
    wanted = ("column", "choice", "against", "centred", "probability", "logit", "kept_nodes", "scores")
    body: dict[str, Any] = {name: getattr(traced, name) for name in wanted}
    shown = ("id", "kind", "layer", "position", "label", "stack")
    units = [node.id.split()[1].split("@")[0] for node in nodes if node.kind == "neuron"]
    known = _known_neurons(_corpus_of(run) if units else None, units)
    known |= known_features(run, [node.id[8:].split("@")[0] for node in nodes if node.kind == "feature"])
    body["nodes"] = [
        {name: getattr(node, name) for name in shown}
        | {"value": short(node.value)}
        | known.get(node.id.rpartition(" ")[2].split("@")[0], {})
        for node in nodes
    ]
    body["edges"] = [
        {"source": edge.source, "target": edge.target, "kind": edge.kind}
        | {"value": short(edge.value), "influence": short(edge.influence)}
        for edge in edges
    ]
    return body


def _from_the_answer(edges: list[GraphEdge]) -> list[GraphEdge]:
    """Order edges, given by influence, so that each leads to a node that the answer was reached from."""
    reached, ordered = {"logit"}, list[GraphEdge]()
    while (edge := next((edge for edge in edges if edge.target in reached), None)) is not None:
        edges.remove(edge)
        ordered.append(edge)
        reached.add(edge.source)
    return ordered


def edge_test(
    run: PageRun,
    source: str,
    target: str,
    kind: str,
    position: int = -1,
    token: int | None = None,
    against: int | None = None,
) -> dict[str, Any]:
    """Return what the model says without one edge of the graph."""
    edge = {"source": source, "target": target, "kind": kind}
    return edge_tests(run, [edge], position, token, against)[0]


def edge_tests(
    run: PageRun,
    edges: Sequence[Mapping[str, Any]],
    position: int = -1,
    token: int | None = None,
    against: int | None = None,
) -> list[dict[str, Any]]:
    """Return the same for several edges, which are tested together."""
    some = [GraphEdge(edge["source"], edge["target"], edge["kind"], 0.0) for edge in edges]
    return [
        effect.to_dict()
        for effect in without_edges(run.m, run.prepared, some, token, position, against=against)
    ]


def neurons(
    run: PageRun,
    position: int = -1,
    token: int | None = None,
    against: int | None = None,
    layer: int | None = None,
) -> dict[str, Any]:
    """Return the neurons that matter to one choice, what promotes them elsewhere, and what they promote.

    With `layer`, those of one feed-forward.
    """
    m, prepared = run.m, run.prepared
    fired_here = firing(m, prepared, token, position, against=against, count=NEURONS, layer=layer)
    corpus = _corpus_of(run)
    known = _known_neurons(corpus, [neuron.name for neuron in fired_here.neurons])
    unknown: dict[str, Any] = {"promotes": [], "fired": []}
    rows = [neuron.to_dict() | known.get(neuron.name, unknown) for neuron in fired_here.neurons]
    return {"choice": fired_here.choice, "neurons": rows, "read": 0 if corpus is None else corpus.texts}


def _corpus_of(run: PageRun) -> ReadCorpus | None:
    """Return what fires neurons in the data that the model learned from, else in the text of the run."""
    if run.prepared.source is not None or not run.prepared.tokens.ids:
        return None
    library = fired(run.m) if run.corpus is None else run.corpus()
    if library is not None or isinstance(run.given, ImagePrompt):  # passages have no images
        return library
    return read_corpus(run.m, [run.prepared], top=FIRED)


def _known_neurons(corpus: ReadCorpus | None, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what each neuron promotes, and where it fires most."""
    if corpus is None or not names:
        return {}
    judged, known = corpus.judged(names), {}
    for name in names:
        neuron = judged.neuron(name)
        fired_at = [{"before": x.before, "token": x.token, "after": x.after} for x in neuron.contexts]
        known[name] = {"promotes": [label for label, _ in neuron.promoted][:6], "fired": fired_at}
    return known


def fired(m: Model) -> ReadCorpus | None:
    """Return what fires every neuron in texts of the model's own data; None where it has none."""
    readable = m.tokenizer is not None and m.config.input == "tokens" and len(m.config.stacks) == 1
    texts = own_texts(m) if readable else []
    return read_corpus(m, texts, top=FIRED) if texts else None


def steered(
    run: PageRun, texts: tuple[str, str], layer: int, strength: float, position: int
) -> dict[str, Any]:
    """Return what the model says before and after a direction is added to its stream.

    A model that writes goes on with the text; another gives its likeliest answers.
    """
    refuse(run.prepared.source is not None, "steering takes a model of one stack")
    m, given = run.m, run.given
    refuse(
        not all(text.strip() for text in texts), "steering takes two texts: one to go toward, one to leave"
    )
    vector = steering_vector(m, *texts, layer)
    size = float(vector.norm())
    writes = m.config.head == "lm" and m.config.family == "decoder"
    answers: list[dict[str, Any]] = []
    for added in (nullcontext(), steering(m, vector, layer, strength)):
        with added:
            if writes:
                written: Any = m.generate(given, WRITTEN, num_beams=1)
                ids = " ".join(map(str, written.ids))
                answers.append({"text": ids if m.tokenizer is None else written.text})
            else:
                prepared = prepare(m, given, None, run.pair)
                choices = choices_of(prepared)
                with torch.no_grad():
                    logits = choices.scores(prepared.run().required_logits)[0, position].float()
                best = logits.softmax(-1).cpu().topk(min(CHOICES, len(logits)))
                named = [{"label": choices.name(int(i)), "p": float(p)} for p, i in zip(*best)]
                answers.append({"choices": named})
    return {"before": answers[0], "after": answers[1], "layer": layer, "strength": strength, "size": size}


def word_map(run: PageRun, position: int = -1) -> dict[str, Any]:
    """Return the vector of the chosen token, its neighbours and the text's tokens on a plane."""
    ids = run.prepared.tokens.ids
    refuse(not ids, "an image has no table of token vectors")
    position = find_column(position, run.prepared.tokens.labels)
    near = neighbours(run.m, ids[position], NEAR)
    words = list(dict.fromkeys([ids[position], *near.ids, *ids]))[: NEAR + 64]
    plane = projection(run.m, words)
    return {
        "labels": list(plane.labels),
        "points": plane.points.tolist(),
        "explained": list(plane.explained),
        "near": [{"label": name, "cosine": score} for name, score in zip(near.labels, near.scores)],
        "kinds": ["chosen", *("near" if word in near.ids else "text" for word in words[1:])],
    }


MOST = 256  # new tokens


def denoising(run: PageRun, tokens: int = 16, steps: int = 8) -> dict[str, Any]:
    """Return what each denoising step unmasked: positions, tokens, and the probability of each.

    Each step keeps the most probable tokens, as in `clearhead generate --temperature 0`. `steps` is for each
    block.
    """
    m = run.m
    refuse(not denoises(m.config), f"denoising is for diffusion models, and this is a {m.config.family}")
    refuse(tokens > MOST, f"{tokens:,} new tokens: the page shows at most {MOST}")
    prompt = run.given if isinstance(run.given, str) else list(run.prepared.tokens.ids)
    options = {"max_new_tokens": tokens, "temperature": 0.0, "denoising_steps": steps}
    request, texts, ends = asked_for(m, [prompt], options)
    with torch.inference_mode():
        (row,) = Sampler(m.model, request, ends).begin(Prompts(texts))
        kept = list(Denoiser(m.engine.runner(), request, row, m.mask_id).steps())
    named = [{**step._asdict(), "labels": list(labels(m.tokenizer, step.tokens))} for step in kept]
    return {"start": len(texts[0]), "tokens": tokens, "steps": named}


EXAMPLES = 3  # contexts that are shown of each feature
PROMOTED = 6


def dictionaries_of(m: Model, named: Sequence[str | Path] = ()) -> tuple[Dictionary, ...]:
    """Return the dictionaries that were named, else those in folders of the model's directory that fit."""
    if named:
        loaded = tuple(load(path) for path in named)
        refuse_unfit(m.model, loaded)
        return loaded
    by_output: dict[str, Dictionary] = {}
    for path in sorted(m.folder.glob(f"*/{WEIGHTS}")) if m.folder is not None and m.folder.is_dir() else ():
        with suppress(ClearheadError):  # of another part, or of another model
            one = load(path.parent)
            refuse_unfit(m.model, [one])
            by_output[one.out] = one
    return tuple(by_output.values())


def known_features(run: PageRun, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what features promote, and where they are strongest, by names such as "3.117"."""
    known: dict[str, dict[str, Any]] = {}
    for dictionary in run.features():
        layer = _layer(dictionary)
        numbers = sorted({int(name.rpartition(".")[2]) for name in names if name.rpartition(".")[0] == layer})
        if not numbers:
            continue
        texts = own_texts(run.m) or [run.given]
        for feature in show_features(run.m, dictionary, texts, numbers, top=EXAMPLES).features:
            fired = [{"before": x.before, "token": x.token, "after": x.after} for x in feature.contexts]
            promotes = [label for label, _ in feature.promoted][:PROMOTED]
            known[f"{layer}.{feature.name}"] = {"promotes": promotes, "fired": fired}
    return known


def strongest_feature(run: PageRun, part: str, position: int) -> dict[str, Any] | None:
    """Return the feature of a feed-forward that adds the longest vector at one token; None without one."""
    layer = part.removeprefix("feedforward:")
    dictionary = next((each for each in run.features() if _layer(each) == layer), None)
    if dictionary is None or layer == part or run.prepared.source is not None:
        return None
    with torch.no_grad():
        x = run.prepared.record(dictionary.at, logits="none")[1][dictionary.at][0, position]
        added = dictionary.encode(x) * dictionary.W_dec.norm(dim=1)
    if not float(added.max()):
        return None
    name = f"{layer}.{int(added.argmax())}"
    return {"name": name, "size": short(float(added.max())), **known_features(run, [name])[name]}


def _layer(dictionary: Dictionary) -> str:
    return dictionary.out.replace("blocks.", "").removesuffix(".feedforward.out")
