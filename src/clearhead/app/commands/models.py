"""Commands about a model as a whole: demo, convert, explore, lab."""

from __future__ import annotations

import socket
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import clearhead as ch
from clearhead.app.commands.common import Folder, check_inputs, load_model, print_notes
from clearhead.app.report import table
from clearhead.app.views import Repeated, View
from clearhead.errors import CheckpointError, InputError, MissingExtraError, nearest, refuse
from clearhead.labs.lab import EXPERIMENTS

if TYPE_CHECKING:
    from clearhead.app.explorer.session import Session


def demo(*, seed: int = 0, steps: int = 400, out: Path | None = None) -> None:
    """Take the tour: train two small models, generate, see where they look, read their cost, check them.

    Args:
        seed: random seed of both models
        steps: steps of the first training; the second takes 1.5 times as many
        out: folder for the models; default: a temporary one

    For example:
      clearhead demo
      clearhead demo --steps 2000 --out demo-models
    """
    from clearhead.app.tour import tour

    tour(seed, steps, out)


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    gguf: Literal["F32", "F16", "Q8_0", "Q4_0"] | None = None,
    cache: bool = False,
    shard_size: str = "5GB",
    tokenizer: Path | None = None,
    overwrite: bool = False,
) -> View:
    """Save a model as the Hugging Face architecture that is exactly it, or explain why there is none.

    Args:
        source (IN): a model directory, clearhead's, Hugging Face's or PEFT's; GGUF; OpenAI's Whisper, .pt
        target (OUT): the directory to write, or the file: .gguf, .onnx, or .pt2 of torch.export
        gguf: type of the matrices of a GGUF file; default: F16 for float16 weights, else F32
        cache: of a decoder as .onnx or .pt2: keys and values of earlier tokens go in and out
        shard_size: largest file, such as 500MB or 5GB

    For example:
      clearhead convert my-model/ out/
      clearhead convert my-model/ out/ --dtype bfloat16 --shard-size 500MB
      clearhead convert stories/ out/ --tokenizer stories/tok512.bin
      clearhead convert tiny.en.pt out/ --tokenizer gpt2.tiktoken
      clearhead convert my-model/ my-model.gguf --gguf Q8_0
      clearhead convert llama.gguf out/
      clearhead convert my-model/ my-model.onnx
    """
    graph = target.suffix in (".onnx", ".pt2")
    single = target.suffix == ".gguf" or graph
    refuse(
        gguf is not None and (not single or graph),
        f"--gguf {gguf} writes one file, and {target} is no name of one: end it in .gguf",
    )
    refuse(
        gguf is not None and dtype is not None,
        f"--gguf {gguf} and --dtype {dtype} were both given: leave one",
    )
    refuse(cache and not graph, f"--cache is for a graph, and {target} is none: end it in .onnx or .pt2")
    refuse(
        graph and dtype not in (None, "float32"),
        f"--dtype {dtype} is not for a graph, which computes in float32: leave it out",
    )
    refuse(graph and shard_size != "5GB", f"--shard-size {shard_size} is for a directory: leave it out")
    refuse(
        single and target.exists() and not overwrite,
        f"{target} exists already: choose another name, or add --overwrite",
        CheckpointError,
    )
    refuse(
        (target / "config.json").exists() and not overwrite,
        f"{target} holds a model already: choose another directory, or add --overwrite",
        CheckpointError,
    )
    from clearhead.hub.checkpoint import explain_export
    from clearhead.learn.parallel.estimate import read_bytes

    limit = read_bytes(shard_size)
    with TemporaryDirectory() as work:
        if source.suffix == ".pt":
            from clearhead.hub.openai_whisper import unpack

            unpack(source, tokenizer, Path(work))
            source, tokenizer = Path(work), None
        model = load_model(source, tokenizer=tokenizer, dtype="float32" if graph else None)
    refuse(
        graph and model.towers is not None,
        f"{source} has two towers: a graph is of one, {source}/text or {source}/image",
    )
    refuse(
        (graph or gguf) and model.image_encoder is not None,
        f"{source} has a decoder and an image tower: convert one, {source}/text or {source}/image",
    )
    body: dict[str, Any] = {"saved": str(target)}
    if graph:
        written = ch.export(model, target, cache)
        axes = {name: [*each] for name, each in written.inputs.items()}
        body |= {"inputs": axes, "outputs": written.outputs, "difference": written.difference}
        lines = [f"saved {target}, a graph for any batch and length", "in:"]
        lines += [f"  {name} [{', '.join(map(str, each))}]" for name, each in axes.items()]
        lines += ["out:", *(f"  {name}" for name in written.outputs)]
        tried = ", ".join(f"{sizes.batch} x {sizes.length}" for sizes in written.tried)
        equal = (
            f"equal to the model to {written.difference:.1e} on rows x tokens {tried}, at every real token"
        )
        return View(body, [*lines, equal])
    model.save(target, gguf or dtype, shard_size=limit)
    saved_as, note = explain_export(model.config, model.description)
    saved_as, note = (f"GGUF of {saved_as}", "") if single else (saved_as, note)
    if model.image_encoder is not None and not single:
        saved_as = f"{model.image_encoder.table.named} ({model.image_encoder.table.model_type})"
    if model.towers is not None:
        saved_as = f"{model.towers.theirs['architectures'][0]} ({model.towers.theirs['model_type']})"
    line = f"saved {target} as {saved_as}" + (f": {note}" if note else "")
    return View({**body, "architecture": saved_as, "note": note}, [line])


def explore(
    folder: Folder,
    *,
    text: str | None = None,
    image: Path | None = None,
    target: str | None = None,
    pair: str | None = None,
    compare: Path | None = None,
    tokenizer: Path | None = None,
    features: Repeated = (),
    export: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8321,
    no_open: bool = False,
) -> None:
    """Open the explorer: tokens, steps, attention, logit lens, next token, ablation, cost on a page.

    Args:
        text: what the page begins with; an image file for a model of images
        image (FILE): an image that stands where the text has the model's image token, such as <image>, or
            before the text
        compare (DIR): a second model, to see side by side
        features (FOLDER): a sparse dictionary of a feed-forward, whose features become nodes of the
            graph; may be given several times; default: those in folders of DIR
        export (FILE.html): write one self-contained page with this text, and open nothing
        no_open: do not open the browser

    For example:
      clearhead explore my-model/
      clearhead explore my-model/ --text "The cat sat on the mat" --export cat.html
      clearhead explore my-model/ --compare other-model/ --port 9000 --no-open
      clearhead explore llava/ --image cat.jpg --text "What is this?"
    """
    check_inputs(folder)
    from clearhead.hub.towers import has_images

    refuse(
        image is not None and not has_images(folder),
        f"--image is for models that read an image with a text, such as LLaVA, and {folder} is none: "
        "leave it out, or name the file as --text for a model of images alone",
    )
    from clearhead.app.explorer.interventions import dictionaries_of
    from clearhead.app.explorer.session import Opened, Session, first_given, starting_example
    from clearhead.inside.features.dictionary import load

    if export is not None:
        from clearhead.app.explorer import findings, record

        model = load_model(folder, tokenizer=tokenizer)
        given, second = first_given(model, text, image)
        known = dictionaries_of(model, features)
        named = (folder.name or str(folder), given, target, pair or second)
        recorded = record.record(model, *named, examples=findings.findings(model), features=known)
        print(record.export(recorded, export))
        return
    from clearhead.hub.checkpoint import describe

    for each in (folder, compare):  # a directory without a model is refused at once, not on the page
        if each is not None:
            describe(each / "text" if has_images(each) else each)
    example = starting_example(text, target, pair, image)
    folders = [Path(each) for each in features]
    for each in folders:
        load(each)  # what cannot be opened is refused at once, too
    models = [
        Opened(folder.resolve().name, lambda: load_model(folder, tokenizer=tokenizer), example, folders)
    ]
    if compare is not None:
        models.append(Opened(compare.resolve().name, lambda: load_model(compare)))
    server, listening, address = page_server(Session(models), host, port)
    print_notes([f"clearhead explorer: {address}  (Ctrl-C ends it)"])
    if not no_open:
        webbrowser.open(address)
    server.run(sockets=[listening])


def page_server(session: Session, host: str, port: int) -> tuple[Any, socket.socket, str]:
    """Return a server of the page, the socket it listens on, and its address; its models begin to load."""
    try:
        import uvicorn

        from clearhead.app.explorer.app import is_loopback, make_app
    except ImportError:
        raise MissingExtraError(
            "the page needs FastAPI and uvicorn: pip install 'clearhead[serve]'"
        ) from None
    listening = bind(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    if not is_loopback(host):
        print_notes([f"warning: {host} can be reached by others: whoever opens {address} can use this model"])
    server = uvicorn.Server(uvicorn.Config(make_app(session, host), log_level="warning", server_header=False))
    session.start()
    return server, listening, address


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address, before anything is loaded."""
    refuse(
        not 0 <= port <= 65535, f"there is no port {port}: choose --port from 0, any that is free, to 65535"
    )
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)  # a browser that comes before the server waits, and is not refused
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port, or 0 for any that is free"
        ) from None
    return listening


def lab(
    name: str | None = None,
    *,
    seeds: int = 3,
    effort: float = 1.0,
    full: bool = False,
    workers: int = 1,
    budget: float = 30.0,
    data: Path | None = None,
    arms: str | None = None,
    out: Path | None = None,
    redraw: bool = False,
) -> View:
    """Run an experiment: every arm with every seed, a report with pictures, and a verdict on each claim.

    A stopped experiment goes on where it was when the command is given again.

    Args:
        name (NAME): an experiment, or all; none: list them
        seeds: run every arm with so many seeds; 3 or more decide a claim
        effort: a factor on the steps of training
        full: ten times the steps, on a GPU where there is one
        workers: trials that run at once, each in a process with one thread
        budget: minutes it may take; one that takes longer is not begun
        data (FILE): the text to learn from, for ladder; default: an embedded one
        arms (NAMES): run the first arm and these alone, with commas between; default: all
        out (DIR): the folder to write; of all: one in it for each; default: lab/NAME
        redraw: train nothing: write report and pictures from results.json

    For example:
      clearhead lab
      clearhead lab residuals
      clearhead lab lstm --seeds 5 --out my-lab/
      clearhead lab ladder --data book.txt --budget 60
      clearhead lab all --workers 8 --budget 60
    """
    if name is None:
        rows = [[key, experiment.summary] for key, experiment in EXPERIMENTS.items()]
        return View(dict(rows), [table("", ("experiment", "what it asks"), rows)])
    refuse(
        name != "all" and name not in EXPERIMENTS,
        f'no experiment is called "{name}"{nearest(name, EXPERIMENTS)}: clearhead lab lists them',
    )
    refuse(effort <= 0 or budget <= 0, f"--effort {effort} and --budget {budget} must be above 0")
    refuse(seeds < 1 or workers < 1, f"--seeds {seeds} and --workers {workers} must be 1 or more")
    import torch

    from clearhead.labs.lab.experiment import (
        Conditions,
        conduct,
        find,
        pace,
        redraw_report,
        run_trials,
        write_report,
    )

    base = out or Path("lab") / ("" if name == "all" else name)
    folders = {title: base / title for title in EXPERIMENTS} if name == "all" else {name: base}
    if redraw:
        drawn = {title: str(redraw_report(title, find(title), folder)) for title, folder in folders.items()}
        return View(drawn, [table("", ("experiment", "written"), drawn.items())])
    device = "cuda" if full and torch.cuda.is_available() else "cpu"
    setting = Conditions(device=device, effort=effort * (10 if full else 1), data=str(data or ""))
    fixed = [title for title in folders if data is not None and not find(title).takes_data]
    refuse(fixed, f"--data is for experiments on any text, and {', '.join(fixed)} has its own: leave it out")
    chosen = {title: find(title) if arms is None else find(title).only(arms.split(",")) for title in folders}
    minutes = sum(each.minutes(seeds, setting) for each in chosen.values()) * pace(device) / workers
    refuse(
        minutes > budget,
        f"{name} would take about {minutes:.0f} minutes here, and --budget is {budget:g}: "
        f"give it more, or choose fewer --seeds, a smaller --effort or more --workers",
    )
    print_notes([*(find(title).question for title in folders), f"About {max(minutes, 0.1):.1f} minutes."])

    def tell(line: str) -> None:
        print_notes([line])

    refuse(
        arms is not None and (name == "all" or workers > 1),
        "--arms is for one experiment in one process: leave --workers out",
    )
    if workers > 1:
        run_trials(folders, seeds, setting, workers, tell)
    options = f"--seeds {seeds}" + f" --effort {effort:g}" * (effort != 1) + " --full" * full
    options += f" --data {data}" if data is not None else ""
    options += f' --arms "{arms}"' if arms is not None else ""
    bodies, rows = [], []
    for title, folder in folders.items():
        experiment = chosen[title]
        findings = conduct(title, experiment, folder, seeds, setting, *[tell] * (workers == 1))
        try:
            written = write_report(findings, folder, f"clearhead lab {title} {options}")
        except MissingExtraError as error:
            written = folder / "report.md"
            print_notes(
                [f"without pictures, since {error}; then clearhead lab {title} --redraw --out {folder}"]
            )
        rows += [
            [title, judged.verdict, judged.text, judged.claim.explain(judged)] for judged in findings.judged
        ]
        bodies.append({**findings.to_dict(), "report": str(written)})
    body = {"experiments": bodies} if name == "all" else bodies[0]
    head = ("experiment", "verdict", "claim", "numbers")
    return View(body, [table("", head, rows, f"written: {base}")])
