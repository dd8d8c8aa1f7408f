"""Finds the installed backends, and checks that each fits this version."""

import dataclasses
import inspect
import platform
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from builders.as_built import WithFloatStates
from enginesmith.core.capabilities import Capabilities
from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError, UnknownNameError
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cpu_kinds import HOST, kind_named, kind_of
from enginesmith.core.hardware.evaluation import evaluate, judge
from enginesmith.core.hardware.machine import Machine, cpu_here, gpu_here
from enginesmith.core.requirements import Gpu, Requirement, Runtime, hardware_of
from enginesmith.core.state import with_int8_states
from enginesmith.core.text import format_bytes, suggest
from enginesmith.core.types import CPU_KIND, Backend, BuildRequest, Engine, Scalar, Session, Target, Untyped

# Finds backends by entry point, and configures them with typed options; no compiler is imported.
#
# A backend is a frozen dataclass (`types.Backend`) whose fields are its options. Any installed distribution adds
# one with a line in its pyproject.toml, under `[project.entry-points."enginesmith.backends"]`.

GROUP = "enginesmith.backends"
# Names that users try but that are no backends: these stacks compile checkpoints of known architectures, not ONNX.
LLM_STACKS = {"tensorrt-llm": "TensorRT-LLM", "mlc-llm": "MLC LLM"}
_SPELLINGS = {"trtllm": "tensorrt-llm", "trt-llm": "tensorrt-llm", "tensorrtllm": "tensorrt-llm", "mlc": "mlc-llm"}

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def names() -> list[str]:
    """The installed backends' names, sorted."""
    return sorted(_entries())


def load(name: str) -> type[Backend]:
    """The backend class of that name. Raises UnknownNameError for an unknown name, EnginesmithError for a class that
    cannot be loaded, and for one that inherits another class's capabilities without declaring them."""
    entry = entry_point(name)
    try:
        backend = typing.cast("type[Backend]", _entries()[name].load())
        if inspect.isclass(backend) and "capabilities" not in vars(backend) and hasattr(backend, "capabilities"):
            owner = next(base_class.__name__ for base_class in backend.__mro__ if "capabilities" in vars(base_class))
            raise EnginesmithError(
                f"backend {name!r} ({entry}) inherits the capabilities of {owner}, which other code relies on; declare "
                f"them in its class: `capabilities = {owner}.capabilities` where all of them hold"
            )
        return backend
    except (ImportError, AttributeError) as error:
        raise EnginesmithError(f"backend {name!r} ({entry}) cannot be loaded: {error}; reinstall it") from error


def load_runtime(backend: Backend) -> Untyped:
    """Import and return the module that opening an engine needs. Raises EnginesmithError where it cannot be loaded."""
    try:
        return import_module(backend.runtime)
    except (ImportError, OSError) as error:
        raise EnginesmithError(f"{backend.runtime} cannot be loaded: {error}; {backend.install}") from error


def entry_point(name: str) -> str:
    """The import path of the backend class of that name: 'package.module:Class'. Raises UnknownNameError."""
    entries = _entries()
    if name not in entries:
        raise UnknownNameError(_llm_stack(name) or f"backend {name!r} is not known; {suggest(name, sorted(entries))}")
    return entries[name].value


@cache
def option_fields(cls: type[Backend]) -> dict[str, tuple[type[Scalar], Scalar]]:
    """A backend's options: name -> (type, default)."""
    hints = typing.get_type_hints(cls)
    fields: Untyped = dataclasses.fields(cls)  # type: ignore[arg-type]  # the protocol cannot say "is a dataclass"
    return {field.name: (hints[field.name], field.default) for field in fields}


def capabilities_of(name: str) -> Capabilities:
    """Capabilities of the backend with this name. Raises as `load`."""
    return load(name).capabilities


def refuse_shards(backend: Backend, size_bytes: int) -> str | None:
    """Why a backend cannot build a model with this many bytes of external weights; None if it can, and for 0."""
    if not size_bytes or backend.capabilities.shards:
        return None
    return (
        f"the weights ({format_bytes(size_bytes)}) lie in files beside the graph, because one ONNX file ends at 2 GB "
        f"(protobuf), and {backend.name} takes a model in one file; use another backend, or a smaller model"
    )


def option_meanings(cls: type[Backend]) -> dict[str, str]:
    """Option -> its meaning: the lines 'option: meaning' of the docstrings of the class and its bases."""
    names_pattern = "|".join(map(re.escape, option_fields(cls)))
    meanings: dict[str, str] = {}
    for base in cls.__mro__:
        text = inspect.cleandoc(base.__doc__ or "")
        for paragraph in re.split(rf"\n(?=(?:{names_pattern}): )|\n\n", text) if names_pattern else ():
            name, colon, meaning = paragraph.partition(": ")
            if colon and name in option_fields(cls):
                meanings.setdefault(name, " ".join(re.sub(r" \(`[^`]*`\)|`", "", meaning).split()))
    return meanings


def configure(name: str, options: Mapping[str, Scalar]) -> Backend:
    """The backend with these options, defaults for the rest.

    Raises UnknownNameError for an unknown backend, InputError for an unknown option or a wrong type or range.
    """
    cls = load(name)
    fields = option_fields(cls)
    values: dict[str, Scalar] = {}
    for key, value in options.items():
        option_name = f"backends.{name}.{key}"
        if key not in fields:
            raise InputError(f"{option_name}: no such option; {suggest(key, sorted(fields))}")
        option_type, default = fields[key]
        values[key] = float(value) if option_type is float and type(value) is int else value
        if type(values[key]) is not option_type:  # exactly: True is not a number here
            kind = _KINDS.get(option_type, option_type.__name__)
            raise InputError(
                f"{option_name}: {value!r} is of type {type(value).__name__}; give {kind}, such as {default!r}"
            )
    return typing.cast("typing.Callable[..., Backend]", cls)(**values)


def options_of(backend: Backend) -> tuple[tuple[str, Scalar], ...]:
    """(name, value) of every option, sorted by name: they are part of a build key."""
    return tuple((name, getattr(backend, name)) for name in sorted(option_fields(type(backend))))


def toolchain_of(backend: Backend, target: Target | None = None) -> tuple[tuple[str, str], ...]:
    """(name, version) of compiler and runtime as installed here, and of the backend's own revision; sorted by name.

    target: what an engine is for. For a CPU target its kind is added (`CPU_KIND`), and where code is compiled for this
    machine's level of x86-64 (`SharedOptions.cpu_level`), the level is that of the target's kind.
    """
    versions = dict(backend.versions())
    if target and target.is_cpu:
        versions[CPU_KIND] = kind_of(target)
        level = dict(options_of(backend)).get(backend.capabilities.options.cpu_level)
        if level == HOST and (kind := kind_named(target.name)):
            versions["cpu"] = kind.level
    return tuple(sorted({**versions, f"enginesmith-{backend.name}": str(backend.revision)}.items()))


def check_toolchain(backend: Backend, planned: BuildRequest) -> None:
    """Raise EnginesmithError if installed versions differ from the build key's, which would describe another engine."""
    versions, planned_versions = dict(toolchain_of(backend, planned.target)), dict(planned.toolchain)
    # The kind of CPU matters to a proof, not to a build.
    names = sorted((versions.keys() | planned_versions.keys()) - {CPU_KIND})
    wrong_names = [name for name in names if versions.get(name) != planned_versions.get(name)]
    if wrong_names:
        differences = ", ".join(
            f"{name} {versions.get(name, 'absent')}, not {planned_versions.get(name, 'absent')}" for name in wrong_names
        )
        raise EnginesmithError(
            f"{platform.node()} differs from the plan: it has {differences}; install the same versions on every node"
        )


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _llm_stack(name: str) -> str | None:
    """Why one of `LLM_STACKS` is no backend, and what to use instead; None for another name."""
    spelling = name.strip().lower().replace("_", "-")
    title = LLM_STACKS.get(_SPELLINGS.get(spelling, spelling))
    if title is None:
        return None
    return (
        f"backend {name!r}: Enginesmith does not build for {title}, which serves a checkpoint with its own runtime: "
        "no ONNX graph could prove it; use tensorrt or tensorrt-rtx for the step of a decoder with its cache as state, "
        f"and {title} itself beside Enginesmith for paged attention (docs/decisions/0008-llm-stacks.md)"
    )


# Decides whether a backend may open an engine on this machine, before any runtime reads the engine.
#
# Runtimes refuse an engine of another version or for other hardware with cryptic messages, with a crash or not at all.
# Here the requirements of its request (`Backend.requires`) decide, so that no runtime is loaded. Standard library only.


@contextmanager
def open_engine(engine: Engine) -> Iterator[Session]:
    """Open the engine with the backend of its request, as a session of the model: int8 states are float32, as in the
    model. Raises as `check_compatible` and `Backend.open` do."""
    backend = configure(engine.request.backend, dict(engine.request.options))
    check_compatible(backend, engine)
    with backend.open(replace(engine, request=with_int8_states(engine.request))) as session:
        states = engine.request.quantized_states
        yield WithFloatStates(session, states) if states else session


def check_compatible(backend: Backend, engine: Engine) -> None:
    """Raise EnginesmithError unless `backend` can open `engine` here, IntegrityError if its file has the wrong size.

    It checks in this order: the backend, the installed versions and the hardware, the size of the file.
    """
    if reason := find_incompatibility(backend, engine.request):
        raise EnginesmithError(f"{engine.path.name}: {reason}")
    size = engine.path.stat().st_size if engine.path.exists() else None
    if size != engine.size_bytes:
        size_text = "does not exist" if size is None else f"has {size} bytes instead of {engine.size_bytes}"
        raise IntegrityError(f"{engine.path} {size_text}; pull the engine or build it again")


def find_incompatibility(backend: Backend, request: BuildRequest) -> str | None:
    """Why an engine of this request cannot be opened by `backend` here, with the remedy; None when it can."""
    if request.backend != backend.name:
        return f"built by {request.backend}, not by {backend.name}; open it with {request.backend}"
    versions = backend.versions()
    if not versions:
        return f"built by {backend.name}, which is not installed here: {backend.install}"
    requires = backend.requires(request)
    gpu = find_compatible_gpu(requires, request.target, cuda.gpus())
    machine = gpu_here(gpu) if gpu else cpu_here()
    processor = hardware_of(requires)
    for finding in evaluate(requires, machine.with_facts(runtimes=versions).with_installed(requires)):
        # For a server, an unknown runtime is only a remark; sessions in this process refuse it.
        is_runtime = isinstance(finding.requirement, Runtime)
        if finding.requirement != processor and (finding.rules_out or (finding.state == "unmet" and is_runtime)):
            remedy = "run it on a node that meets this, or build it again for this node"
            return f"{finding.words}; {'install that version, or build it again here' if is_runtime else remedy}"
    missing_text = judge(processor, machine).words if processor else ""  # if the backend gives no reason
    if reason := backend.runs(machine.target if gpu else request.target) or missing_text:
        return f"built for {request.target.name}, and cannot run here: {reason}; run it on a node that has one"
    return None


def find_compatible_gpu(
    requires: Sequence[Requirement], target: Target, gpus: Sequence[cuda.GpuDevice]
) -> cuda.GpuDevice | None:
    """The GPU to open an engine on: one of its target's own compute capability, else a compatible one.

    None for an engine for CPUs, and if no GPU is compatible.
    """
    processor = hardware_of(requires)
    if not isinstance(processor, Gpu):
        return None
    compatible_gpus = [gpu for gpu in gpus if judge(processor, Machine(gpu.compute_capability)).state == "met"]
    return min(compatible_gpus, key=lambda gpu: gpu.compute_capability != target.compute_capability, default=None)
