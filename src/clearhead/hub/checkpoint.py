"""Checkpoints: a model directory becomes a config and a model, and the other way round.

The model is built on the meta device, where it costs no memory, and each parameter then is a part of the
mapped file, or a copy where the file has another dtype or layout.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import (
    CheckpointError,
    ClearheadError,
    ConfigError,
    MissingExtraError,
    nearest,
    no_model,
)
from clearhead.hub import gguf_architectures, preprocessor, sentences
from clearhead.hub.architecture import (
    SECTION,
    Architecture,
    as_stored,
    check_bounds,
    check_sizes,
    common_dtype,
    is_among,
)
from clearhead.hub.files import read_json, read_json_if_any, refuse, write_json
from clearhead.hub.gguf import is_gguf, open_gguf, read_header
from clearhead.hub.quantized import Packed, is_packed, place_like, unpacked
from clearhead.hub.registry import ARCHITECTURES, ONE_TOWER, architecture_of, nearest_to, tower_path
from clearhead.hub.rules import Rule, Shape, matches
from clearhead.hub.tokenizer import load_tokenizer, open_tokenizer, read_settings, special_ids
from clearhead.hub.weights import Entry, Outgoing, allocated, cast, equal, finite, held, open_weights
from clearhead.learn.data.files import RECIPE
from clearhead.run.kernels.transpose import is_transposed, lay_out_when_trained, row_major

READERS = min(4, os.cpu_count() or 1)  # threads: they wait for memory
SHARES = 16  # of the tensors: passing each on its own to a thread takes as long as reading a small one
SMALL = 1 << 20  # bytes of a matrix that is transposed at once; larger ones stay views until that is needed
OWN = Architecture(SECTION, {"ClearheadModel": {}}, (), ())  # tensors under our own names


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    theirs: dict[str, Any]
    config: ModelConfig
    kind: str  # the model_type of its architecture
    carried: Mapping[str, Entry] = field(default_factory=dict)  # tensors of other heads in the file
    stored: Architecture | None = None  # the rules of a file in another layout: GGUF
    apart: tuple[str, ...] = ()  # tensors of the file that are no part of the Transformer

    @property
    def architecture(self) -> Architecture:
        """The table of rules by which the checkpoint is read and written."""
        return OWN if self.kind == SECTION else (ARCHITECTURES | ONE_TOWER)[self.kind]


def describe(folder: Path) -> Description:
    """Read config.json; where it does not name a class, as old files do not, the tensors tell."""
    if is_gguf(folder):
        theirs, stored = gguf_architectures.read_config(read_header(folder))
        architecture = architecture_of(theirs)
        return Description(theirs, architecture.read(theirs), architecture.model_type, stored=stored)
    if (part := tower_path(folder)) is not None:
        whole, table, tower = part
        theirs = table.section(read_json(whole / "config.json"), tower)
        architecture = architecture_of(theirs)
        return Description(theirs, architecture.read(theirs), architecture.model_type)
    if (folder / RECIPE).is_file() and not (folder / "config.json").exists():
        use = f"use {folder / 'last'}, or " if (folder / "last").is_dir() else ""
        raise CheckpointError(
            f"the run in {folder} is not finished: {use}go on with clearhead train --resume {folder}"
        )
    theirs = read_json(folder / "config.json")
    if sentences.is_stanford(theirs):
        return _stanford(theirs)
    if SECTION not in theirs and not (theirs.get("model_type") and theirs.get("architectures")):
        theirs = _recognise(folder, theirs)
    section = theirs.get(SECTION)
    architecture = OWN if theirs.get("model_type") == SECTION else architecture_of(theirs)
    if section is None and architecture is not OWN:
        return Description(theirs, architecture.read(theirs), architecture.model_type)
    stated = section.get("config") if isinstance(section, dict) else None
    if not isinstance(stated, dict):
        raise CheckpointError(f'{folder / "config.json"} has no config in its "{SECTION}" section')
    check_sizes(stated)
    try:
        config = ModelConfig.from_dict(stated)
        config = config if architecture is OWN else architecture.merge(config, theirs)
        return Description(theirs, config, architecture.model_type)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def _stanford(theirs: dict[str, Any]) -> Description:
    """Return the base model of a ColBERT of Stanford; its layer on each token is read with its settings."""
    architecture = architecture_of(theirs)
    base = next((name for name in architecture.classes if name.endswith("Model")), None)
    refuse(
        base is None, f"config.json names {sentences.STANFORD}, and {architecture.model_type} is no encoder"
    )
    theirs = {**theirs, "architectures": [base]}
    return Description(theirs, architecture.read(theirs), architecture.model_type, apart=(sentences.LINEAR,))


def _recognise(folder: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the class whose rules read every tensor; unchanged unless there is one kind."""
    try:
        entries, theirs = unpacked(open_weights(folder), theirs)
    except CheckpointError:
        return theirs
    readable: list[tuple[int, dict[str, Any]]] = []
    for kind, architecture in ARCHITECTURES.items():
        stated = theirs.get("model_type", None if not architecture.named else "")
        if stated not in (None, kind) or not architecture.names_all(entries):
            continue
        for name in architecture.classes:
            candidate = {**theirs, "model_type": kind, "architectures": [name]}
            try:
                filled, _, _ = _fill(
                    folder, Description(candidate, architecture.read(candidate), kind), entries
                )
                readable.append((len(filled.carried), candidate))
            except ClearheadError:
                continue
    if len({candidate["model_type"] for _, candidate in readable}) != 1:
        return theirs
    return min(readable, key=lambda each: each[0])[1]  # the class that leaves the fewest tensors aside


def default_names(count: int) -> tuple[str, ...]:
    """Return the names of classes that have none: LABEL_0, LABEL_1, ..."""
    return tuple(f"LABEL_{number}" for number in range(count))


def class_labels(description: Description) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids, where config.json names each."""
    names = description.theirs.get("id2label")
    numbers = [str(number) for number in range(description.config.n_classes)]
    if isinstance(names, dict) and set(names) == set(numbers):
        return tuple(str(names[number]) for number in numbers)
    return default_names(len(numbers))


# Loading ----------------------------------------------------------------------------------------------------


class _Undrawn(TorchFunctionMode):
    """Skip the drawing of fresh weights: on the meta device it only imports a compiler, for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(config: ModelConfig) -> Transformer:
    """Return a model on the meta device, where it costs no memory, for weights that are at hand."""
    with torch.device("meta"), _Undrawn():
        return Transformer(config)


@torch.inference_mode(False)  # weights are ordinary tensors, wherever they are loaded
def load_model(
    folder: Path,
    description: Description,
    dtype: torch.dtype | None = None,
    mapped: bool = True,
    entries: dict[str, Entry] | None = None,
    check_finite: bool = True,
) -> tuple[Transformer, Description]:
    """Return the model of a directory, on the CPU, and the description with what its weights add.

    The dtype is that of the file unless `dtype` is given. Where the file has several, `common_dtype` decides.
    `mapped` weights are pages of the file, where it has them in this dtype; matrices that it holds transposed
    stay so, as views. `entries` are the tensors to read, where the file holds those of others. With
    `check_finite`, weights that are NaN or infinite are refused.
    """
    model, description, unread = open_model(folder, description, dtype, mapped, entries)
    parts, sources = dict(model.named_modules()), unread.sources
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    converted = [name for rule, entry in sources for name in rule.ours if entry.dtype != dtypes[name]]
    room = allocated({name: unread.shapes[name] for name in converted}, dtypes)
    counts = Counter(id(entry) for _, entry in sources)

    def read(source: tuple[Rule, Entry]) -> dict[str, Tensor]:
        rule, entry = source
        twice = counts[id(entry)] > 1  # a table that fills two parameters is two tables from now on
        entry = dataclasses.replace(entry, release=lambda: None) if twice else entry
        tensors = {}
        for name, tensor in zip(rule.ours, unread.read(rule, entry)):
            if name in room:
                tensor = cast(tensor, dtypes[name], rule.theirs, into=room[name])
            elif is_transposed(tensor) and tensor.nbytes < SMALL:
                tensor = row_major(tensor)
            tensors[name] = tensor.clone() if twice else tensor
        if check_finite:
            finite(folder, rule.theirs, list(tensors.values()))
        if all(name in room for name in tensors):
            entry.release()
        return tensors

    sources.sort(key=lambda source: -math.prod(source[1].shape))  # the largest first: threads end together
    shares = [sources[first::SHARES] for first in range(min(SHARES, len(sources)))]
    with ThreadPoolExecutor(READERS) as pool:
        for share in pool.map(lambda share: list(map(read, share)), shares):
            for tensors in share:
                put_parameters(parts, tensors)
    model.tie()
    if not mapped:
        carried = {name: held(entry.read()) for name, entry in description.carried.items()}
        description = dataclasses.replace(description, carried=carried)
    return model, description


@dataclass(frozen=True)
class Unread:
    """Weights that are on disk still: which tensor fills which parameters."""

    folder: Path
    config: ModelConfig
    shapes: dict[str, Shape]  # of the parameters
    sources: list[tuple[Rule, Entry]]
    check_finite: bool = False  # of what `each` reads

    def read(self, rule: Rule, entry: Entry) -> list[Tensor]:
        """Return the parameters that one tensor of the file becomes."""
        wrong = f"{self.folder}: tensor {rule.theirs} has"
        tensors = _loaded(rule, entry, [self.shapes[name] for name in rule.ours], self.config)
        for name, tensor in zip(rule.ours, tensors):
            needs = f"{name} needs {self.shapes[name]}: config.json does not fit"
            refuse(tensor.shape != self.shapes[name], f"{wrong} shape {entry.shape} and {needs}")
            whole = not tensor.is_floating_point()
            refuse(whole, f"{wrong} dtype {tensor.dtype}: weights must be floating point")
        return tensors

    def each(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters by name, one tensor of the file at a time, in the dtype of the file."""
        for rule, entry in self.sources:
            if not set(rule.ours).isdisjoint(wanted):
                tensors = self.read(rule, entry)
                yield from zip(
                    rule.ours, finite(self.folder, rule.theirs, tensors) if self.check_finite else tensors
                )
                entry.release()


def _loaded(rule: Rule, entry: Entry, shapes: list[Shape], config: ModelConfig) -> list[Tensor]:
    """Read one tensor as our parameters; where that makes copies, give the file's pages back at once."""
    theirs = entry.read()
    if not theirs.is_floating_point():
        return [theirs]
    try:
        ours = rule.operation.load([theirs], shapes, config)
    except RuntimeError:  # it cannot be split into those shapes
        return [theirs]
    if rule.operation.copies:
        entry.release()
    return ours


def open_model(
    folder: Path,
    description: Description,
    dtype: torch.dtype | None = None,
    mapped: bool = True,
    entries: dict[str, Entry] | None = None,
) -> tuple[Transformer, Description, Unread]:
    """Return the model of a directory on the meta device, in its dtype, and the weights as they lie on disk.

    See `load_model`.
    """
    if entries is None:
        description, entries = _open(folder, description, mapped)
    description, model, sources = _fill(folder, description, entries)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    dtype = dtype or common_dtype(description.theirs, [entry for _, entry in sources])
    dtypes = {name: dtype or entry.dtype for rule, entry in sources for name in rule.ours}
    others = {name: dtypes[name] for name, parameter in parameters.items() if parameter.dtype != dtypes[name]}
    empty = {name: torch.empty(shapes[name], dtype=other, device="meta") for name, other in others.items()}
    put_parameters(dict(model.named_modules()), empty)
    model.tie()
    place_like(model, dtype or next(iter(dtypes.values()), torch.float32))
    return model.eval(), description, Unread(folder, description.config, shapes, sources)


def _open(folder: Path, description: Description, mapped: bool) -> tuple[Description, dict[str, Entry]]:
    """Return the tensors of a directory, and the description of a model whose weights are not packed so."""
    theirs = description.theirs
    if (part := tower_path(folder)) is not None:
        whole, table, tower = part
        entries = table.tensors(open_weights(whole, mapped), whole)[tower]
    elif is_gguf(folder):
        entries = open_gguf(read_header(folder), mapped)
    elif is_packed(theirs):
        entries = open_weights(folder, mapped)
    else:
        entries, theirs = unpacked(open_weights(folder, mapped), theirs)
    return dataclasses.replace(description, theirs=theirs), entries


def put_parameters(parts: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Make tensors the parameters of these names; `parts` are the model's modules by their names."""
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        before = getattr(parts[path], last, None)
        frozen = isinstance(before, nn.Parameter) and before.is_meta and not before.requires_grad
        parameter = nn.Parameter(tensor, tensor.is_floating_point() and not frozen)
        if is_transposed(parameter):
            lay_out_when_trained(parameter)
        setattr(parts[path], last, parameter)


def _fill(
    folder: Path, description: Description, entries: dict[str, Entry]
) -> tuple[Description, Transformer, list[tuple[Rule, Entry]]]:
    """Decide which tensor fills which parameter; refuse the file when one is left over on either side.

    Return the description with what the weights add, an empty model, and the rule for each tensor to read.
    """
    architecture = description.stored or description.architecture
    prefix = architecture.prefix
    if prefix and not any(name.startswith(prefix) for name in entries):  # saved from the bare base model
        entries = {prefix + name: entry for name, entry in entries.items()}
    packed = Packed(folder, description.theirs, entries) if is_packed(description.theirs) else None
    entries = entries if packed is None else packed.others
    config, entries = as_stored(description.config, description.theirs, architecture, entries)
    check_bounds(folder, config, entries if packed is None else packed.bounds())
    model = empty_model(config)
    if packed is not None:
        packed.install(model)
    chosen: dict[str, Rule] = {}
    unused = {*entries} - {*description.apart}
    for rule in matching_rules(model, architecture):
        if rule.theirs in entries:
            unused.discard(rule.theirs)
            first = chosen.setdefault(rule.ours[0], rule)  # a tied tensor that is written twice is read once
            decided = rule.copy or rule.theirs in architecture.tied
            refuse(
                not decided and not equal(entries[first.theirs], entries[rule.theirs]),
                f"{folder}: {first.theirs} and {rule.theirs} are one tensor to this architecture, "
                "and the file holds two that differ",
            )
    patterns = architecture.carries(config, entries)
    carried = {name: entries[name] for name in sorted(unused) if is_among(name, patterns)}
    unused = {name for name in unused - set(carried) if not is_among(name, architecture.ignored)}
    filled = {name for rule in chosen.values() for name in rule.ours}
    missing = [name for name, _ in model.named_parameters() if name not in filled]
    if unused:
        name = min(unused)
        raise CheckpointError(
            f"{folder}: no rule of {architecture.model_type} reads the tensor {name}{more(unused)}"
            f"{nearest(name, architecture.tensor_names())}: config.json and weights do not belong together"
        )
    if missing:
        raise CheckpointError(
            f"{folder}: no tensor fills {missing[0]}{more(missing)}: "
            "the file is incomplete, or config.json is another model's"
        )
    sources = [(rule, entries[rule.theirs]) for rule in chosen.values()]
    return dataclasses.replace(description, config=config, carried=carried, stored=None), model, sources


def rules_of(architecture: Architecture, model: Transformer) -> tuple[Rule, ...]:
    """Return the rules that apply to this model; our own format has each parameter under its own name."""
    return architecture.rules_for(model.config) or tuple(
        Rule(name, (name,)) for name, _ in model.named_parameters()
    )


def matching_rules(model: Transformer, architecture: Architecture) -> Iterator[Rule]:
    """Yield the rules with layers and experts filled in; tied parameters go by their first name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for rule in matches(rules_of(architecture, model), names):
        ours = tuple(names[name] for name in rule.ours)
        yield rule if ours == rule.ours else dataclasses.replace(rule, ours=ours)


def more(names: Collection[str]) -> str:
    """Say how many names there are besides the first."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# Writing ----------------------------------------------------------------------------------------------------


def exported(config: ModelConfig, original: Description | None = None) -> Description:
    """Return what a model is saved as: its architecture and config.json, and tensors of other heads.

    A model that is as it was loaded is saved as it came, with keys that we have no word for. Where no
    architecture expresses all of our config, a section of our own does.
    """
    if original is not None and original.config == config:
        return original
    architecture, differences = nearest_to(config)
    own = {SECTION: {"config": config.to_dict()}}
    theirs = None if architecture is None or differences else architecture.write(config)
    if architecture is None or theirs is None:
        return Description(
            {"architectures": list(OWN.classes), "model_type": SECTION, **own}, config, SECTION
        )
    if architecture.read(theirs) != config:  # it computes the same, and would train differently
        theirs |= own
    return Description(theirs, config, architecture.model_type)


def explain_export(config: ModelConfig, original: Description | None = None) -> tuple[str, str]:
    """Return what a model is saved as, and the fields that keep it from being a Hugging Face architecture."""
    saved = exported(config, original)
    if saved.kind != SECTION:
        return f"{saved.theirs['architectures'][0]} ({saved.kind})", ""
    closest, differences = nearest_to(config)
    if closest is None:
        return SECTION, (
            "no Hugging Face architecture has this family and head, "
            "so config.json has clearhead's own section"
        )
    listed = ", ".join(differences[:6]) + (", ..." if len(differences) > 6 else "")
    return SECTION, (
        f"the nearest Hugging Face architecture is {closest.model_type}, which cannot express {listed}"
    )


def outgoing(
    model: Transformer, description: Description, dtype: torch.dtype | None = None
) -> dict[str, Outgoing]:
    """Return the tensors that a model is written as, by name; carried ones stay as they are.

    Their sources are names of parameters. The weights themselves are not read.
    """
    architecture, carried = description.stored or description.architecture, description.carried
    parameters = dict(model.named_parameters())
    base = architecture.prefix if model.config.head in ("none", "embedding") else ""

    def kept(name: str, entry: Entry) -> Outgoing:
        stored_as = dtype or entry.dtype
        return Outgoing(entry.shape, stored_as, (), lambda sources: cast(entry.read(), stored_as, name))

    rules = export_state(model, architecture).values()
    tensors = {rule.theirs: outgoing_tensor(rule, parameters, model.config, dtype) for rule in rules}
    tensors |= {name: kept(name, entry) for name, entry in carried.items()}
    return {name.removeprefix(base): tensor for name, tensor in tensors.items()}


def outgoing_tensor(
    rule: Rule, parameters: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype | None
) -> Outgoing:
    """Return the tensor that a rule makes of parameters, to be written in `dtype`, else in theirs."""
    ours = [parameters[name] for name in rule.ours]
    stored = dtype or ours[0].dtype
    empty = [torch.empty(parameter.shape, dtype=stored, device="meta") for parameter in ours]

    def make(sources: list[Tensor]) -> Tensor:
        return rule.operation.save([cast(source, stored, rule.theirs) for source in sources], config)[0]

    return Outgoing(tuple(rule.operation.save(empty, config)[0].shape), stored, rule.ours, make)


def write_config(folder: Path, theirs: Mapping[str, Any], tensors: Mapping[str, Outgoing]) -> None:
    """Write config.json of a model that is written as these tensors."""
    dtypes = (tensor.dtype for tensor in tensors.values())
    first = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)
    write_json(folder / "config.json", {**theirs, "dtype": str(first).removeprefix("torch.")})


def export_state(model: Transformer, architecture: Architecture) -> dict[str, Rule]:
    """Return the rule that makes each tensor of the checkpoint, by name; each parameter is written once."""
    rules: dict[str, Rule] = {}
    written: set[str] = set()
    for rule in matching_rules(model, architecture):
        if rule.ours[0] not in written or rule.copy:
            written.update(rule.ours)
            rules[rule.theirs] = rule
    missing = [name for name, _ in model.named_parameters() if name not in written]
    if missing:
        raise CheckpointError(f"no rule of {architecture.model_type} writes {missing[0]}{more(missing)}")
    return rules


# Files next to the weights ---------------------------------------------------------------------------------


GENERATION = "generation_config.json"


def read_tokenizer_and_settings(
    path: Path, description: Description, tokenizer: str | Path | None
) -> dict[str, Any]:
    """Return the fields of a `Bundle` that are read from files next to the weights, by name.

    `tokenizer` names one that lies elsewhere. Of a tower, the files are those of both.
    """
    part = tower_path(path)
    folder = path if part is None else part[0]
    generation = read_json_if_any(folder / GENERATION)
    empty = (folder / GENERATION).exists() and not generation
    refuse(empty, f"{folder / GENERATION} is empty: remove it, and config.json counts")
    if tokenizer is None:
        its_tokenizer, settings = load_tokenizer(folder), read_settings(folder)
    else:
        its_tokenizer, settings = open_tokenizer(Path(tokenizer), folder)
    return {
        "tokenizer": its_tokenizer,
        "generation": generation,
        "special": special_ids(its_tokenizer, settings, generation, description.theirs),
        "settings": settings,
        "labels": class_labels(description),
        "sentences": sentences.read_sentences(folder, description.config),
        "images": preprocessor.read_preprocessor(folder),
    }


def download(name: str) -> Path:
    """Return the directory that holds a model of the Hub, fetched where it is not there yet."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("downloading needs huggingface_hub: pip install 'clearhead[hub]'") from None
    patterns = ["*.json", "*.safetensors", "*.model", "*.spm", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(f"{name} could not be downloaded: {str(error).splitlines()[0]}") from None


def local_or_downloaded(name: str | Path, allow_download: bool) -> Path:
    """Return a directory or GGUF file that is here; any other name is fetched, where that is allowed."""
    path = Path(name)
    if path.is_dir() or is_gguf(path) or tower_path(path) is not None:
        return path
    refuse(path.is_file(), no_model(path))
    refuse(not allow_download, f"{no_model(path)}, or in Python by load with allow_download=True")
    return download(str(name))
