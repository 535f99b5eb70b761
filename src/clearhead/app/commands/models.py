"""Commands about a model as a whole: demo, convert, explore, lab."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.app.commands.common import (
    Dtype,
    Folder,
    Json,
    Tokenizer,
    check_inputs,
    load_model,
    option,
    print_notes,
    show_result,
)
from clearhead.app.report import table
from clearhead.errors import CheckpointError, InputError, MissingExtraError, nearest, refuse
from clearhead.labs.lab import EXPERIMENTS

if TYPE_CHECKING:
    from clearhead.app.explorer.session import Session


def demo(
    seed: Annotated[int, option("random seed of both models")] = 0,
    steps: Annotated[int, option("steps of the first training; the second takes 1.5 times as many")] = 400,
    out: Annotated[Path | None, option("folder for the models; default: a temporary one")] = None,
) -> None:
    """Take the tour: train two small models, generate, see where they look, read their cost, check them.

    For example:
      clearhead demo
      clearhead demo --steps 2000 --out demo-models
    """
    from clearhead.app.tour import tour

    tour(seed, steps, out)


def convert(
    source: Annotated[
        Positional[Path],
        option(
            "a model directory, clearhead's, Hugging Face's or PEFT's; GGUF; OpenAI's Whisper, .pt",
            metavar="IN",
        ),
    ],
    target: Annotated[
        Positional[Path],
        option("the directory to write, or the file: .gguf, .onnx, or .pt2 of torch.export", metavar="OUT"),
    ],
    dtype: Dtype = None,
    gguf: Annotated[
        Literal["F32", "F16", "Q8_0", "Q4_0"] | None,
        option("type of the matrices of a GGUF file; default: F16 for float16 weights, else F32"),
    ] = None,
    cache: Annotated[
        bool, option("of a decoder as .onnx or .pt2: keys and values of earlier tokens go in and out")
    ] = False,
    shard_size: Annotated[str, option("largest file, such as 500MB or 5GB")] = "5GB",
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, option("write into OUT although it holds a model already")] = False,
    json: Json = False,
) -> None:
    """Save a model as the Hugging Face architecture that is exactly it, or explain why there is none.

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
        bool(graph) and model.towers is not None,
        f"{source} has two towers: a graph is of one, {source}/text or {source}/image",
    )
    if graph:
        _convert_to_graph(model, target, cache, json)
        return
    model.save(target, gguf or dtype, shard_size=limit)
    saved_as, note = explain_export(model.config, model.description)
    saved_as, note = (f"GGUF of {saved_as}", "") if single else (saved_as, note)
    if model.towers is not None:
        saved_as = f"{model.towers.theirs['architectures'][0]} ({model.towers.theirs['model_type']})"
    body = {"saved": str(target), "architecture": saved_as, "note": note}
    show_result(body, json, [f"saved {target} as {saved_as}" + (f": {note}" if note else "")])


def _convert_to_graph(model: ch.Model, target: Path, cache: bool, json: bool) -> None:
    made = ch.export(model, target, cache)
    axes = {name: [*each] for name, each in made.inputs.items()}
    lines = [f"saved {target}, a graph for any batch and length", "in:"]
    lines += [f"  {name} [{', '.join(map(str, each))}]" for name, each in axes.items()]
    lines += ["out:", *(f"  {name}" for name in made.outputs)]
    tried = ", ".join(f"{sizes.batch} x {sizes.length}" for sizes in made.tried)
    lines.append(f"equal to the model to {made.difference:.1e} on rows x tokens {tried}, at every real token")
    body = {"saved": str(target), "inputs": axes, "outputs": made.outputs, "difference": made.difference}
    show_result(body, json, lines)


def explore(
    folder: Folder,
    text: Annotated[
        str | None, option("what the page begins with; an image file for a model of images")
    ] = None,
    target: Annotated[
        str | None, option("what the decoder of an encoder-decoder has written; default: its own answer")
    ] = None,
    pair: Annotated[str | None, option("the second text, for an encoder of pairs")] = None,
    compare: Annotated[Path | None, option("a second model, to see side by side", metavar="DIR")] = None,
    tokenizer: Annotated[Path | None, option("where the tokenizer lies, if not with the model")] = None,
    export: Annotated[
        Path | None,
        option("write one self-contained page with this text, and open nothing", metavar="FILE.html"),
    ] = None,
    host: Annotated[
        str, option("address to listen on; others than this machine's own let others in")
    ] = "127.0.0.1",
    port: Annotated[int, option("0: any that is free")] = 8321,
    no_open: Annotated[bool, option("do not open the browser")] = False,
) -> None:
    """See a model think, on a page: tokens, steps, attention, lens, next token, ablation, cost.

    For example:
      clearhead explore my-model/
      clearhead explore my-model/ --text "The cat sat on the mat" --export cat.html
      clearhead explore my-model/ --compare other-model/ --port 9000 --no-open
    """
    check_inputs(folder)
    from clearhead.app.explorer.session import Opened, Session, first_given, starting_example

    if export is not None:
        from clearhead.app.explorer import findings, record

        model = load_model(folder, tokenizer=tokenizer)
        given, second = first_given(model, text)
        asked = (folder.name or str(folder), given, target, pair or second)
        print(record.export(record.record(model, *asked, examples=findings.findings(model)), export))
        return
    from clearhead.hub.checkpoint import describe

    describe(folder)  # a directory without a model is refused at once, not on the page
    example = starting_example(text, target, pair)
    models = [Opened(folder.resolve().name, lambda: load_model(folder, tokenizer=tokenizer), example)]
    if compare is not None:
        describe(compare)
        models.append(Opened(compare.resolve().name, lambda: load_model(compare)))
    _serve(Session(models), host, port, browser=not no_open)


def _serve(session: Session, host: str, port: int, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    server, listening, address = page_server(session, host, port)
    print_notes([f"clearhead explorer: {address}  (Ctrl-C ends it)"])
    if browser:
        import webbrowser

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
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)  # a browser that comes before the server waits, and is not refused
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port, or 0 for any that is free"
        ) from None
    return made


def lab(
    name: Annotated[
        Positional[str | None], option("an experiment, or all; none: list them", metavar="NAME")
    ] = None,
    seeds: Annotated[int, option("run every arm with so many seeds; 3 or more decide a claim")] = 3,
    effort: Annotated[float, option("a factor on the steps of training")] = 1.0,
    full: Annotated[bool, option("ten times the steps, on a GPU where there is one")] = False,
    workers: Annotated[int, option("trials that run at once, each in a process with one thread")] = 1,
    budget: Annotated[float, option("minutes it may take; one that takes longer is not begun")] = 30.0,
    out: Annotated[
        Path | None,
        option("the folder to write; of all: one in it for each; default: lab/NAME", metavar="DIR"),
    ] = None,
    redraw: Annotated[bool, option("train nothing: write report and pictures from results.json")] = False,
    json: Json = False,
) -> None:
    """Run an experiment: every arm with every seed, a report with pictures, and a verdict on each claim.

    A stopped experiment goes on where it was when the command is given again.

    For example:
      clearhead lab
      clearhead lab residuals
      clearhead lab lstm --seeds 5 --out my-lab/
      clearhead lab all --workers 8 --budget 60
    """
    if name is None:
        rows = [[key, one.summary] for key, one in EXPERIMENTS.items()]
        show_result(dict(rows), json, [table("", ("experiment", "what it asks"), rows)])
        return
    refuse(
        name != "all" and name not in EXPERIMENTS,
        f'no experiment is called "{name}"{nearest(name, EXPERIMENTS)}: clearhead lab lists them',
    )
    refuse(effort <= 0 or budget <= 0, f"--effort {effort} and --budget {budget} must be above 0")
    refuse(seeds < 1 or workers < 1, f"--seeds {seeds} and --workers {workers} must be 1 or more")
    import torch

    from clearhead.labs.lab import report
    from clearhead.labs.lab.experiment import Conditions, conduct, find, pace, run_trials

    base = out or Path("lab") / ("" if name == "all" else name)
    folders = {one: base / one for one in EXPERIMENTS} if name == "all" else {name: base}
    if redraw:
        drawn = {one: str(report.redraw(one, find(one), folder)) for one, folder in folders.items()}
        show_result(drawn, json, [table("", ("experiment", "written"), [*drawn.items()])])
        return
    device = "cuda" if full and torch.cuda.is_available() else "cpu"
    setting = Conditions(device=device, effort=effort * (10 if full else 1))
    minutes = sum(find(one).minutes(seeds, setting) for one in folders) * pace(device) / workers
    refuse(
        minutes > budget,
        f"{name} would take about {minutes:.0f} minutes here, and --budget is {budget:g}: "
        f"give it more, or choose fewer --seeds, a smaller --effort or more --workers",
    )
    print_notes([*(find(one).question for one in folders), f"About {max(minutes, 0.1):.1f} minutes."])

    def tell(line: str) -> None:
        print_notes([line])

    if workers > 1:
        run_trials(folders, seeds, setting, workers, tell)
    options = f"--seeds {seeds}" + f" --effort {effort:g}" * (effort != 1) + " --full" * full
    bodies, rows = [], []
    for one, folder in folders.items():
        experiment = find(one)
        findings = conduct(one, experiment, folder, seeds, setting, *[tell] * (workers == 1))
        try:
            written = report.write(findings, folder, f"clearhead lab {one} {options}")
        except MissingExtraError as error:
            written = folder / "report.md"
            print_notes(
                [f"without pictures, since {error}; then clearhead lab {one} --redraw --out {folder}"]
            )
        rows += [[one, judged.verdict, judged.claim.text, judged.sentence()] for judged in findings.judged]
        bodies.append({**findings.to_dict(), "report": str(written)})
    body = {"experiments": bodies} if name == "all" else bodies[0]
    head = ("experiment", "verdict", "claim", "numbers")
    show_result(body, json, [table("", head, rows, f"written: {base}")])
