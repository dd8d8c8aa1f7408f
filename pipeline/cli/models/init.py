"""`enginesmith init`, and the commands that read specs."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from enginesmith.cli.options import command, emit_json, number_option, path_option, say
from enginesmith.cli.tables import echo
from enginesmith.core.errors import DataError, InputError, ModelError
from enginesmith.core.names import inside
from enginesmith.core.text import pluralize
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import start_atomic_write

if TYPE_CHECKING:
    from pipeline.drafts.facts import FoundEnsemble, FoundModel
    from pipeline.drafts.requests import Scaling, SplitRequests
    from pipeline.orchestration.watch import WatchedSpec
    from pipeline.sources.hub import HubFile

_SCALINGS = ("imagenet", "unit", "symmetric", "bytes")
# Writes a file's content into a stream.
_Writer = Callable[[IO[bytes]], object]
_WEIGHTS = (
    "holds weights or a pickled module, without the model's code; give the function that makes the module, such as "
    "model.py:build, and name a state dict in source.weights of the spec"
)
_TO_ONNX = "is not read; convert it to ONNX"
_ENGINE = "is an engine that a compiler made; give the ONNX file that it was made of"
# Remedies for files of other kinds, by suffix.
_OTHERS = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".safetensors"), _WEIGHTS),
    **dict.fromkeys((".h5", ".hdf5", ".keras", ".pb", ".tflite"), f"{_TO_ONNX} with tf2onnx"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), f"{_TO_ONNX} with skl2onnx, options={{'zipmap': False}}"),
    **dict.fromkeys((".engine", ".plan", ".trt", ".ort", ".xml"), _ENGINE),
    ".gguf": "holds a language model for llama.cpp, which is a serving stack of its own",
    ".mlmodel": f"{_TO_ONNX} with onnxmltools",
    ".pdmodel": f"{_TO_ONNX} with paddle2onnx",
}


@command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@path_option("--out", "File to write.", "MODEL's name and .yaml, beside the model", dir_okay=False)
@click.option(
    "--from-requests",
    "requests",
    type=click.Path(path_type=Path, exists=True),
    help="Recorded requests to use as calibration and golden data: .jsonl of `enginesmith traffic record`, .npz, "
    ".npy, JSON, or a folder of images.",
)
@click.option(
    "--scaling",
    type=click.Choice(_SCALINGS),
    default="imagenet",
    show_default=True,
    help="How to scale pixels of images in --from-requests; imagenet: by ImageNet's mean and standard deviation; "
    "unit: 0..1; symmetric: -1..1; bytes: unchanged.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(models: tuple[str, ...], out: Path | None, requests: Path | None, scaling: "Scaling", force: bool) -> None:
    """Write a spec for MODEL: its inputs with their names, types and shapes, and the sizes at which the model runs.

    MODEL: an ONNX file, a .pt2 program, a torch entry point such as model.py:build or package.models:build, Triton's
    config.pbtxt of an ONNX model or an ensemble, or the folder of an ONNX Runtime model package. Without MODEL, init
    writes a commented starter.

    Several ONNX files, in the order of the data flow, become an ensemble: init writes a spec for each file, and a
    spec that connects outputs to inputs whose names and shapes match. NAME=FILE sets the name of a graph.
    """
    ensemble: FoundEnsemble | None = None
    if len(models) == 1 and models[0].endswith(".pbtxt"):
        from pipeline.drafts.onnx_model import look_at_ensemble

        ensemble = look_at_ensemble(Path(models[0]))
    if len(models) > 1 or ensemble:
        if requests:
            raise InputError("--from-requests accepts one MODEL; for several, the ensemble's spec names the data")
        return _init_ensemble(models, out, force, ensemble)
    return _init_one(models[0] if models else None, out, requests, scaling, force)


def _init_one(model: str | None, out: Path | None, requests: Path | None, scaling: "Scaling", force: bool) -> None:
    if model is None or model.endswith((".yaml", ".yml")):
        if requests:
            raise InputError("--from-requests needs a MODEL to know the inputs; give its file")
        path = out or Path(model or "model.yaml")
        text = files("pipeline.spec").joinpath("starter.yaml").read_bytes()
        _write({path: text}, force)
        say(f"wrote {path}; fill in the files it names, then: enginesmith plan {path}")
        return
    is_file = ":" not in model or Path(model).exists()
    _say_inputs(Path(model))
    from pipeline.drafts.text import write_spec
    from pipeline.sources.hub import find_cached

    model_facts, path = _look(Path(model), out) if is_file else _look_at_entry_point(model, out, requests)
    states = [state.input for state in model_facts.states] if requests else []
    hub_file = find_cached(Path(model))
    file = path.parent / (hub_file.path if hub_file else str(model_facts.source.get("onnx", "")))
    model_facts, writers = _split(model_facts, file, requests, scaling) if requests else (model_facts, {})
    text = write_spec(model_facts, *writers).encode()
    _write({path: text, **{path.parent / name: writers[name] for name in writers}}, force)
    say(f"wrote {path}: {pluralize(len(model_facts.inputs), 'input')}, {pluralize(len(model_facts.dims), 'dim')}")
    for line in _describe(model_facts, states, bool(writers)):
        say(f"  {line}")
    say(f"read it, then: enginesmith plan {path}")


def _say_inputs(model: Path) -> None:
    """Say what an ONNX file takes and gives, before the seconds that its sizes take; nothing of another file."""
    from pipeline.sources.onnx_header import format_shape, read_header

    if model.suffix.lower() == ".onnx" and model.is_file():
        with suppress(ModelError):  # `_look` says why
            header = read_header(model)
            inputs = ", ".join(f"{tensor.name} {format_shape(tensor.shape or ())}" for tensor in header.inputs)
            say(f"{model.name}: {inputs} -> {', '.join(header.outputs)}; running it to find its sizes")


def _describe(model: "FoundModel", given_states: Sequence[str], has_data: bool) -> Iterator[str]:
    """Facts about a model, one per line. given_states: states that requests contain as ordinary inputs."""
    yield from model.notes
    yield from (f"{tensor.name}: {tensor.dtype} [{', '.join(map(str, tensor.shape))}]" for tensor in model.inputs)
    if given_states:
        yield f"{', '.join(given_states)}: ordinary inputs, as in the requests; without --from-requests they are states"
    yield from (f"{state.input} is a state: it takes {state.output} of the previous call" for state in model.states)
    yield from (f"{name} {dim.min}..{dim.max}: {dim.why}" for name, dim in model.dims.items())
    if model.refused:
        yield model.refused
    if model.unknown:
        yield f"fill in: {', '.join(model.unknown)}; the lines are marked FILL_IN"
    if not has_data:
        yield "no data: engines are proven on random inputs, and int8 is left out; add data with --from-requests"


# Files that `build` takes in the place of a spec.
MODELS = (".onnx", ".pt2", ".pbtxt")


def draft_spec(model: Path, targets: str | None) -> tuple[Path, bool]:
    """The spec of a model's file, which is written beside it where it is not there; and whether it was written.

    targets: names with commas; None is what the model's file says. Raises InputError where another model's spec is in
    its place.
    """
    from pipeline.drafts.text import write_spec
    from pipeline.orchestration.run import split_names
    from pipeline.spec.model import load_spec

    model_facts, path = _look(model, None)
    if path.exists():
        source = load_spec(path).source
        if dict(model_facts.source) != {key: getattr(source, key) for key in model_facts.source}:
            raise InputError(f"{path} is the spec of another model; rename one of them, or name the spec")
        return path, False
    model_facts = replace(model_facts, targets=tuple(split_names(targets)) or model_facts.targets)
    _write({path: write_spec(model_facts).encode()}, force=False)
    return path, True


def _init_ensemble(models: tuple[str, ...], out: Path | None, force: bool, ensemble: "FoundEnsemble | None") -> None:
    """Write the ensemble's spec into the folder of the first graph, and a spec for each graph beside it. If the first
    graph is in the cache of the Hugging Face Hub, the specs go into the current folder; those of an ensemble of
    Triton's go into the model repository."""
    from pipeline.drafts import text as drafts
    from pipeline.drafts.facts import graph_key, model_name
    from pipeline.sources.hub import find_cached
    from pipeline.sources.onnx_header import read_header

    named_models = [*ensemble.graphs.items()] if ensemble else [_split_name(text) for text in models]
    first_model = named_models[0][1]
    if ensemble:
        path = out or first_model.parents[1] / f"{ensemble.name}.yaml"
    elif hub_file := find_cached(first_model):
        path = out or Path(f"{model_name(hub_file.name)}.yaml")
    else:
        path = out or first_model.parent / f"{model_name(first_model.resolve().parent.name)}.yaml"
    ensemble_name, graphs = model_name(path.stem), list[drafts.FoundGraph]()
    for name, model in named_models:
        if model.is_file() and model.suffix.lower() != ".onnx" and not ensemble:
            raise InputError(f"{model} is not ONNX, and only ONNX files can be connected; export it to ONNX")
        model_facts, _ = _look(model, path.parent / "spec.yaml")
        file = path.parent / str(model_facts.source["onnx"]) if ensemble else model
        outputs_by_name = {tensor.name: tensor for tensor in read_header(file).gives}
        outputs = tuple(outputs_by_name[name] for name in model_facts.outputs or outputs_by_name)
        key = graph_key(name or model.stem, [graph.key for graph in graphs])
        model_facts = replace(model_facts, name=model_name(f"{ensemble_name}-{key}"))
        graphs.append(drafts.FoundGraph(key, model_facts, outputs))
    drafts.check_unknown(graphs)
    graphs = drafts.connect_states(graphs)
    files = {graph.key: f"{graph.model.name if graph.key == path.stem else graph.key}.yaml" for graph in graphs}
    if len({path.name, *files.values()}) <= len(files):
        raise InputError(f"{path} and {', '.join(files.values())} must be different files; name graphs with NAME=FILE")
    texts = {path: drafts.write_ensemble(ensemble_name, graphs, files, ensemble).encode()}
    texts |= {path.parent / files[graph.key]: drafts.write_spec(graph.model).encode() for graph in graphs}
    _write(texts, force)
    say(f"wrote {path}, and {', '.join(files.values())} for its graphs")
    for key, state in ((graph.key, state) for graph in graphs for state in graph.model.states):
        say(f"  {key}.{state.input} is a state: it takes {state.output} of the previous call")
    for connection in drafts.find_connections(graphs, ensemble):
        say(f"  {connection.key}: {connection.source or 'FILL_IN'}: {connection.why}")
    for key, is_apart in ({} if ensemble else drafts.find_unconnected(graphs)).items():
        unclear_text = "FILL_IN: nothing shows what connects it; if nothing does, name its outputs in outputs"
        say(f"  {key}: {'side by side: no output fits an input' if is_apart else unclear_text}")
    say(f"read them, write the data that golden names, then: enginesmith plan {path}")


def _split_name(text: str) -> tuple[str, Path]:
    """A graph's name ('' without NAME=), and its file, whose name may contain '='."""
    name, separator, file = text.partition("=")
    return ("", Path(text)) if Path(text).exists() or not separator else (name, Path(file))


def _look(model: Path, out: Path | None) -> tuple["FoundModel", Path]:
    """Contents of a model file, and the path of its spec."""
    from pipeline.compile.preflight import POINTER, is_pointer
    from pipeline.drafts.model_package import MANIFEST, look_at_package
    from pipeline.drafts.onnx_model import look_at_onnx, look_at_triton
    from pipeline.drafts.torch_model import look_at_pt2
    from pipeline.sources.hub import find_cached

    if (model / "saved_model.pb").is_file():
        raise InputError(f"{model} {_OTHERS['.pb']}")
    if not model.is_file() and not (model / MANIFEST).is_file():
        problem = "is a folder" if model.is_dir() else "does not exist"
        raise InputError(
            f"{model} {problem}; name an ONNX file, a .pt2, an entry point such as model.py:build, config.pbtxt, or a "
            "model package, which has a manifest.json"
        )
    if is_pointer(model):
        raise InputError(f"{model} {POINTER}")
    if hub_file := find_cached(model):
        return _look_in_cache(model, hub_file, out)
    suffix = model.suffix.lower()
    folder = (out or model).parent
    relative_path = _below(model, folder)
    if model.is_dir():
        model_facts = look_at_package(model, folder)
    elif suffix == ".pbtxt":
        model_facts = look_at_triton(model, folder)
    elif suffix == ".onnx":
        inside(relative_path)
        model_facts = look_at_onnx(model, relative_path)
    elif suffix == ".pt2":
        model_facts = look_at_pt2(folder, inside(relative_path))
    elif suffix == ".py":
        raise InputError(f"{model} names no function; name the one that returns the module: {model}:build")
    else:
        suffix_problem = f"has the ending {suffix or 'none'}, which is unknown; .onnx, .pt2 and .pbtxt are known"
        raise InputError(f"{model} {_OTHERS.get(suffix, suffix_problem)}")
    return model_facts, out or folder / f"{model_facts.name}.yaml"


def _look_in_cache(model: Path, hub_file: "HubFile", out: Path | None) -> tuple["FoundModel", Path]:
    """As `_look`, for a file in the cache of the Hugging Face Hub. The spec goes into the current folder. Raises
    InputError, before anything is written, if that folder is in the cache too."""
    from pipeline.drafts.facts import model_name
    from pipeline.drafts.onnx_model import look_at_onnx
    from pipeline.sources.hub import fetch, find_cached

    folder = (out.parent if out else Path()).resolve()
    if not hub_file.file.endswith(".onnx"):
        problem = "is in the cache of the Hugging Face Hub, and is not an .onnx file; copy it out of the cache"
        raise InputError(f"{model} {_OTHERS.get(model.suffix.lower(), problem)}")
    if find_cached(folder / "spec.yaml"):
        remedy = "run in another folder, or give `enginesmith init` an --out outside of the cache"
        raise InputError(f"{folder}, where the spec goes, is in the cache of the Hugging Face Hub; {remedy}")
    fetch(hub_file, folder)
    model_facts, name = look_at_onnx(folder / hub_file.path, hub_file.path), model_name(hub_file.name)
    source = {"hf": hub_file.repository, "revision": hub_file.revision, "file": hub_file.file}
    return replace(model_facts, name=name, source=source), out or Path(f"{name}.yaml")


def _below(file: Path, folder: Path) -> str:
    """The file's path in the folder of the spec. Raises InputError for one outside of it."""
    real_file, real_folder = file.resolve(), folder.resolve()
    if not real_file.is_relative_to(real_folder):
        raise InputError(f"{real_file} is outside {folder}, where the spec goes; a spec names files of its own folder")
    return str(real_file.relative_to(real_folder))


def _look_at_entry_point(text: str, out: Path | None, requests: Path | None) -> tuple["FoundModel", Path]:
    """Facts from an entry point's module, and the path of its spec: beside the file, or the folder of the package."""
    from pipeline.drafts.torch_model import look_at_module

    module, _, function = text.rpartition(":")
    folder = out.parent if out else Path(module).parent if module.endswith(".py") else Path()
    if module.endswith(".py"):
        module = _below(Path(module), folder)
    model_facts = look_at_module(folder, f"{module}:{function}", requests)
    return model_facts, out or folder / f"{model_facts.name}.yaml"


def _split(
    model: "FoundModel", file: Path, requests: Path, scaling: "Scaling"
) -> tuple["FoundModel", dict[str, _Writer]]:
    """The model with dims that hold the sizes of the requests, and what writes each file of samples.

    Its states are inputs like others: requests were taken from a caller, who gave all of the inputs.
    An input that decides a branch, and is the same in all requests, becomes a constant: the dims are of that branch.
    file: of an ONNX model, in which requests that hold indices are tried at other sizes."""
    if model.unknown:
        problem = f"nothing says what {', '.join(model.unknown)} is; fill the spec in without --from-requests"
        raise InputError(model.refused or problem)
    from builders.reference import open_interpreter, run_within
    from pipeline.drafts.facts import as_inputs
    from pipeline.drafts.onnx_model import look_at_onnx
    from pipeline.drafts.probing import RUN_SECONDS, hold_samples
    from pipeline.drafts.requests import split_requests, write_samples
    from pipeline.spec.source import LARGEST_SIZE

    def split_for(facts: "FoundModel", constants: Sequence[TensorSpec] = ()) -> "SplitRequests":
        dims = [Dim(key, dim.multiple, dim.opt, LARGEST_SIZE, multiple=dim.multiple) for key, dim in facts.dims.items()]
        return split_requests(requests, [*facts.inputs, *constants], dims, scaling)

    plain_model = as_inputs(model)
    try:
        split = split_for(plain_model)
        values = {name: split.scalars[name] for name in sorted(model.deciding & split.scalars.keys())}
        if values and not model.serve:  # what serves it goes on giving these inputs
            model_facts, source = look_at_onnx(file, file.name, values), {**model.source, "arguments": values}
            plain_model = replace(as_inputs(model_facts), name=model.name, source=source)
            split = split_for(plain_model, [spec for spec in model.inputs if spec.name in values])
        plain_model = plain_model.hold_sizes(split.sizes, split.ranges)
    except DataError as error:
        if state_input := next((state.input for state in model.states if repr(state.input) in str(error)), None):
            raise DataError(
                f"{error}. {state_input!r} is a state: write the spec without --from-requests, and its golden data as "
                "sequences of steps (docs/guides/state.md); or record steps with the states that they were given "
                "(recorder.append(streams.complete(inputs))), and they are ordinary inputs"
            ) from error
        if model.refused and model.refused != str(error):
            raise DataError(f"{model.refused}; the requests do not fit its layers either: {error}") from error
        raise
    subsets = {"calibration": split.calibration, "golden": split.golden}
    names = [spec.name for spec in plain_model.inputs]
    samples = {key: [{name: sample[name] for name in names} for sample in subset] for key, subset in subsets.items()}
    for name, subset in samples.items():
        say(f"{name}.npz: {pluralize(len(subset), 'request')}")
    for omission in split.left_out:
        say(f"  {omission}")
    if file.is_file() and any("int" in spec.dtype for spec in plain_model.inputs):  # floats are no indices
        session, request = open_interpreter(file, model.name), split.golden[0]
        runner = partial(run_within, session, seconds=RUN_SECONDS)
        plain_model = hold_samples(
            plain_model, lambda inputs: runner({**request, **inputs}), samples["golden"], split.ranges
        )
    return plain_model, {f"{name}.npz": partial(write_samples, requests=samples[name]) for name in samples}


def _write(files: Mapping[Path, _Writer | bytes], force: bool) -> None:
    """Write files, all of them or none: each under another name first. Raises InputError for one that exists."""
    for path in files:
        if path.exists() and not force:
            raise InputError(f"{path} exists; choose another name, or overwrite it with --force")
    with ExitStack() as exit_stack:
        try:
            started_files = {path: exit_stack.enter_context(start_atomic_write(path.parent)) for path in files}
            for path, file in started_files.items():
                content = files[path]
                if isinstance(content, bytes):
                    file.stream.write(content)
                else:
                    content(file.stream)
            for path, file in started_files.items():
                file.commit(path)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror or error}; free space, or use --out") from None


@command()
@click.option("--ensemble", is_flag=True, help="Schema of ensemble specs (docs/guides/ensembles.md).")
def schema(ensemble: bool) -> None:
    """Print the JSON Schema of a spec, for editors and pre-commit checks."""
    from pipeline.spec.ensembles.model import EnsembleSpec
    from pipeline.spec.model import ModelSpec

    json_schema = (EnsembleSpec if ensemble else ModelSpec).model_json_schema()
    title = f"Enginesmith {'ensemble' if ensemble else 'model'} spec"
    json_schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema, "title": title}
    echo(json.dumps(json_schema, indent=2))


@command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--no-event", is_flag=True, help="Only store the spec; send no event to Prefect.")
def register(spec: Path, registry: str, no_event: bool, as_json: bool) -> None:
    """Store SPEC and the files that it names in the registry, and send Prefect the event that starts a build.

    Stored: the spec, its source (an entry point with the local modules that it imports), weights, calibration and
    golden data. Not stored: installed packages, and files that the code opens itself.
    """
    from pipeline.intake.registration import register as register_spec
    from pipeline.spec.ensembles.model import load_any

    loaded_spec = load_any(spec)
    store = open_store(registry, create=True)
    entry, was_registered = register_spec(store, loaded_spec)
    document = {
        "model": loaded_spec.model,
        "spec": entry.address,
        "registry": store.uri,
        "files": dict(entry.bundle.files),
    }
    if not as_json:
        state = "registered already" if was_registered else "registered"
        echo(f"{entry.address}\n{state} in {store.uri}, {pluralize(len(entry.bundle.files), 'file')}")
    sent_event = None
    if not no_event:
        from pipeline.orchestration.watch import send_registered

        sent_event = send_registered(store, entry)
        say(f"sent to {sent_event.server}: {sent_event.event} {sent_event.id}")
    if as_json:
        emit_json({**document, "existed": was_registered, "event": asdict(sent_event) if sent_event else None})


@command("watch")
@click.argument("place", metavar="LOCATION")
@number_option("--interval", click.FloatRange(0.1), 30.0, "Seconds between polls.")
@click.option("--once", is_flag=True, help="Poll once, register what is new, and exit.")
def watch_specs(place: str, registry: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch LOCATION (a folder, a file:// URI or a bucket prefix), and register each new or changed spec.

    A spec is registered when its files have not changed between two polls. Each event is sent once, even after a
    restart. With --json, the command prints one line of JSON for each spec that was registered or cannot be read.
    """
    from pipeline.orchestration.watch import watch_place

    def show(watched_spec: "WatchedSpec") -> None:
        if as_json:
            echo(json.dumps(asdict(watched_spec)))
        else:
            (echo if watched_spec.told else say)(f"{watched_spec.spec}: {watched_spec.said}")

    store = open_store(registry, create=True)
    with watch_place(store, place, show) as watch:
        if once:
            watch.look(stable_only=False)
            return
        say(f"watching {place} every {interval:g} s; Ctrl-C ends it")
        watch.run(interval, threading.Event())
