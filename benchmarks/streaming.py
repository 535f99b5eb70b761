"""Long texts: streaming, and training for longer contexts."""

from __future__ import annotations

import gzip
import itertools
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from benchmarks.common import case_parser, device_name, save

import clearhead as ch
from clearhead.app.plot import save as save_picture
from clearhead.app.plot import single
from clearhead.app.plot.models import draw_long
from clearhead.run.generate.decode import decode, prefill
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts, Sequence
from clearhead.run.kernels.prepare import prepared

# streaming ------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]
PIECE = 256  # tokens read at a time


def resident() -> float:
    """Memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def held(cache: ch.Cache) -> int:
    """Bytes of the keys, values, states and slots that a cache holds."""
    layers = [vars(layer).values() for layer in cache.layers.values()]
    rings = [ring.tensors() for ring in getattr(cache, "rings", {}).values()]
    found = torch.utils._pytree.tree_leaves([list(each) for each in layers + rings])
    return sum(part.nbytes for part in {id(part): part for part in found}.values() if torch.is_tensor(part))


def measure_tokens(
    config: ch.ModelConfig, cache: ch.Cache, request: Request, ends: list[int]
) -> list[dict[str, float]]:
    """Read and generate one text; return a row of figures for each stretch of it, by where it ends."""
    model, rows, new = prepared(ch.Transformer(config)), [], request.max_new_tokens
    text = torch.randint(256, (ends[-1],)).tolist()  # what is read
    for start, end in itertools.pairwise([0, *ends]):
        stamps: list[float] = []

        def watch(number: int, row: Sequence, stamps: list[float] = stamps) -> None:
            stamps.append(time.process_time())

        began = time.process_time()
        with torch.inference_mode():
            if end - start > new:
                prefill(model, [text[: end - start - new]], cache)
            read = time.process_time() - began
            prompt = [0] * cache.length + text[-1:]  # the cache has read all but the last
            decode(model, request, Prompts([prompt]), Ends(on_token=watch), cache)
        steps = sorted(later - earlier for earlier, later in itertools.pairwise(stamps))
        row = {
            "to": end,
            "ms_median": round(1e3 * steps[len(steps) // 2], 3),
            "ms_quickest_tenth": round(1e3 * steps[len(steps) // 10], 3),
            "us_a_token_read": round(1e6 * read / max(1, end - start - new), 1),
            "cache_bytes": held(cache),
            "resident_mib": round(resident(), 1),
        }
        rows.append(row)
        print("  ".join(f"{name} {value:,}" for name, value in row.items()), flush=True)
    return rows


@torch.inference_mode()
def likelihoods(m: ch.Model, ids: list[int], cache: ch.Cache, name: str) -> torch.Tensor:
    """Negative log-likelihood of each token after the first, read in pieces: [T-1]."""
    found, row = [], torch.tensor([ids])
    for start in range(0, len(ids) - 1, PIECE):
        wanted = row[0, start + 1 : start + PIECE + 1]
        logits = m.model(row[:, start : start + len(wanted)], cache=cache).logits[0]
        found.append(nnf.cross_entropy(logits.float(), wanted, reduction="none"))
        if start // PIECE % 8 == 0:
            print(f"{name} {start:,}: {found[-1].mean():.3f}", flush=True)
    return torch.cat(found)


def compare(
    folder: Path, text: Path, tokens: int, window: int, sinks: int, every: int
) -> Iterator[dict[str, Any]]:
    """Read a text in three ways; after each, yield mean negative log-likelihoods of `every` tokens so far."""
    m = ch.load(folder)
    raw = gzip.decompress(text.read_bytes()) if text.suffix == ".gz" else text.read_bytes()
    ids = m.prompt_ids(raw.decode()[: 8 * tokens])[: tokens + 1]
    title = f"{folder.name}: trained on {m.config.max_positions:,} tokens at a time"
    about = {"title": title, "trained": m.config.max_positions, "text": text.name, "tokens": len(ids) - 1}
    ways = {
        "dense": ch.Cache(tokens + 1),
        f"window {window}": ch.StreamCache(m.config, window, 0),
        f"window {window} with {sinks} sinks": ch.StreamCache(m.config, window, sinks),
    }
    curves, figures = {}, {}
    for name, cache in ways.items():
        started = time.process_time()
        losses = likelihoods(m, ids, cache, name)
        curves[name] = [round(float(part.mean()), 4) for part in losses.split(every)]
        figures[name] = {
            "within_window": round(float(losses[:window].mean()), 4),
            "past_window": round(float(losses[window : m.config.max_positions].mean()), 4),
            "past_training": round(float(losses[m.config.max_positions :].mean()), 4),
            "cpu_seconds": round(time.process_time() - started, 1),
        }
        print(name, figures[name], flush=True)
        yield {**about, "every": every, "rows": figures, "curves": curves}


def draw(found: dict[str, Any], out: Path) -> None:
    """Draw the curves against the tokens read, and a line at the trained length."""
    figure, axes = single(
        8, 4, found["title"], "tokens read", "negative log-likelihood of a token", grid="both"
    )
    for name, curve in found["curves"].items():
        axes.plot([(place + 0.5) * found["every"] for place in range(len(curve))], curve, label=name)
    axes.axvline(found["trained"], color="grey", linestyle=":")
    axes.legend()
    save_picture(figure, out)


def run_streaming() -> None:
    """Stream: time and memory of a token over a million of them, and the likelihood of a long text by
    position.

        python benchmarks/run.py streaming [--tokens 1000000] [--block 50000] [--new 1000] [--save]
        python benchmarks/run.py streaming --attention linear [--tokens 1000000] [--new 200] [--save]
        python benchmarks/run.py streaming --model DIR --text FILE [--tokens 16384]
        [--window 1024] [--sinks 4]
            [--save]

    The first form feeds a tiny model of random weights one text. Of each block of tokens all but the last
    are read in pieces, and the last are generated, one at a time: CPU time of a generated token, bytes of
    the cache, memory of the process. `--new` as large as the block generates every token. The second form
    does the same with layers that keep a state, at 1,000, 10,000, 100,000 and 1,000,000 tokens.

    The third form reads a text with a checkpoint in three ways, as in StreamingLLM's picture: dense, with
    all keys, also past the length the model was trained on; a window, the last keys alone; and a window of
    the same size whose first tokens are sinks. It writes negative log-likelihoods by position, and a
    picture into docs/images, both under the name of the checkpoint's folder.
    """
    parser = case_parser(run_streaming)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint; without one, a tiny model of random weights"
    )
    parser.add_argument("--text", type=Path, help="a text file, .gz too")
    parser.add_argument("--tokens", type=int, help="default: 1,000,000; of a text, 16,384")
    parser.add_argument(
        "--window", type=int, help="tokens that are kept, sinks too; default: 256; of a text, 1024"
    )
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--attention", default="full", help="of the tiny model, as in a config")
    parser.add_argument("--block", type=int, default=50_000)
    parser.add_argument("--new", type=int, default=1000, help="generated at the end of each block")
    parser.add_argument("--every", type=int, default=256, help="tokens of a point of the picture")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about: dict[str, object] = {"device": device_name(), "torch": torch.__version__}
    if options.model is not None:
        tokens, window = options.tokens or 16_384, options.window or 1024
        name = f"streaming_{options.model.name}"
        for found in compare(options.model, options.text, tokens, window, options.sinks, options.every):
            if options.save:
                save(name, [{**about, **found}])
                draw(found, ROOT / "docs" / "images" / f"{name}.png")
    else:
        tokens, window = options.tokens or 1_000_000, options.window or 256
        config = ch.ModelConfig(
            vocab_size=256, d_model=32, n_layers=2, n_heads=4, positions="rope", norm="rmsnorm", gated=True,
            bias=False, max_positions=window, attention=options.attention,
        )  # fmt: skip
        request = Request(max_new_tokens=options.new, temperature=1.0)
        if options.attention == "full":
            title, name = f"one text, window {window} with {options.sinks} sinks", "streaming"
            request = replace(request, overflow="stream", sinks=options.sinks)
            cache: ch.Cache = ch.StreamCache(config, window, options.sinks)
            ends = list(range(options.block, tokens + 1, options.block))
        else:
            title, name = f"one text, attention {options.attention}", f"streaming_{options.attention}"
            cache, ends = ch.Cache(), [end for end in (10**power for power in range(3, 9)) if end <= tokens]
        found = {"title": title, "rows": measure_tokens(config, cache, request, ends)}
        if options.save:
            save(name, [{**about, **found}])


# long_context ---------------------------------------------------------------------------------------------


SHARED = ROOT.parent / "shared"
BOOK = SHARED / "data" / "book" / "war_and_peace.txt.gz"
STORIES = SHARED / "data" / "tinystories_sample" / "tinystories.txt"
WEIGHTS = SHARED / "weights" / "stories260K"
KINDS = ("window(128)", "linear")
COST = {"parts": ["cost"], "length": 8192, "scalings": ()}
SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")


def trained(out: Path, steps: int) -> Path:
    """A character model of the book that knows 64 positions."""
    settings: dict[str, Any] = {
        "model.positions": "rope",
        "model.max_positions": 64,
        "model.d_model": 64,
        "model.n_layers": 3,
        "data.batch_size": 16,
        "train.steps": steps,
        "train.validate_every": 500,
        "train.device": "cpu",
        "train.threads": 1,
        "train.seed": 0,
    }
    return ch.train(BOOK, recipe="char-gpt-cpu", out=out, settings=settings).folder


def of_kind(m: ch.Model, attention: str) -> ch.Model:
    """A model of the same size with another kind of attention, and random weights."""
    return ch.Model(ch.Transformer(m.config.replace(attention=attention)).eval())


def rounded(value: Any) -> Any:
    """The same with five significant digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def shown(title: str, found: ch.LongReport) -> dict[str, object]:
    """Print the main figures; return all of them."""
    print(f"\n{title}  [{device_name()}, torch {torch.__version__}]")
    if found.perplexity is not None:
        sides = [side for side in (found.perplexity.within, found.perplexity.beyond) if side is not None]
        print("  perplexity " + ", ".join(f"{one.start}-{one.stop}: {one.perplexity:.2f}" for one in sides))
    for scaling in found.scalings:
        print(f"  {scaling.name:<12}" + "".join(f"{value:10.2f}" for value in scaling.perplexities))
    for grid in found.retrieval:
        print(f"  {grid.probe:<12}right {np.nanmean(grid.right):.3f}, chance {grid.chance:.3f}")
    if found.cost is not None:
        print(f"  slopes {found.cost.slopes}")
    about = {"title": title, "device": device_name(), "torch": torch.__version__}
    body = {**found.to_dict(), "text": found.text and Path(found.text).name}
    del body["notes"]
    for scaling in body["scalings"]:
        del scaling["scaling"]  # its name says it
    return {**about, **rounded(body)}


def run_long_context() -> None:
    """Measure two small models on long contexts, as `clearhead long` does, with scalings of rotary positions.

        python benchmarks/run.py long_context [--steps 2000] [--rows 16] [--trials 20] [--model DIR] [--save]

    One is a character model with rotary positions, trained here on rows of 64 tokens of a book and measured
    on the tenth of it that was held out. The other is stories260K, trained on 512 tokens, measured on the
    book and on stories. Book, stories and weights lie in the shared folder beside the repository. `--model`
    names a character model that is trained already. `--save` writes benchmarks/results/long_context.json,
    and pictures: docs/images/long_char.png, long_cost.png and long_stories.png.
    """
    parser = case_parser(run_long_context)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.model or trained(Path(tempfile.mkdtemp()) / "char", options.steps)
    char = ch.load(folder)
    stories = ch.load(WEIGHTS / "hf", tokenizer=WEIGHTS / "tok512.bin")
    asked: dict[str, Any] = {"rows": options.rows, "trials": options.trials, "scalings": SCALINGS}
    jobs: list[tuple[str, ch.Model, Any, dict[str, Any], str | None]] = [
        ("a character model, on the book it held out", char, (), {"length": 256, "rows": 64}, "long_char"),
        ("the character model, cost", char, (), COST, "long_cost"),
        *((f"the same with attention {kind}, cost", of_kind(char, kind), (), COST, None) for kind in KINDS),
        ("stories260K, on a book", stories, BOOK, {}, "long_stories"),
        ("stories260K, on stories", stories, STORIES, {"parts": ["perplexity"]}, None),
    ]
    results = []
    for title, model, text, more, picture in jobs:
        found = ch.long(model, text, **{**asked, **more})
        results.append(shown(title, found))
        if options.save and picture is not None:
            about = f"{title}: trained length {found.trained}, rows of {found.length:,} tokens"
            save_picture(draw_long(found, about), ROOT / "docs" / "images" / f"{picture}.png")
    if options.save:
        save("long_context", results)
