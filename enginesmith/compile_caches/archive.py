"""The file of a compile cache: a zip with the recipe of a model and the files of a cache folder of Inductor.

The files hold code: pickles, Python and shared libraries. Nothing here reads them; `unpack` writes them to a folder.
"""

import ast
import inspect
import json
import re
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginesmith.core import parsing
from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import IntegrityError, digest_of
from enginesmith.core.requirements import Requirement
from enginesmith.core.text import DAMAGED, check_compression

if TYPE_CHECKING:
    import torch

# What a compile cache was made from, as far as a model in memory shows it: options, classes, tensors, threads.
#
# torch finds a cached graph by the graph itself, so another model costs time and never gives another model's answers.
# The recipe tells such a model beforehand, and says what differs.

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class CompileOptions:
    """What torch.compile is called with. dynamic: axes by input whose sizes are symbols from the first call on, so that
    a second size compiles nothing; a size of 1 has a graph of its own in torch all the same."""

    mode: CompileMode = "default"
    fullgraph: bool = False
    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def compile(self, model: "torch.nn.Module") -> Callable[..., Any]:
        """The model as a function that compiles itself when it is called, and records no gradients."""
        import torch

        compiled = torch.compile(model, mode=self.mode, fullgraph=self.fullgraph)
        inputs = inspect.signature(model.forward)

        def call(*given: Any, **named: Any) -> Any:
            for name, value in inputs.bind_partial(*given, **named).arguments.items():
                for axis in self.dynamic.get(name, ()):
                    # Not `dynamic=True`: that takes each size for a symbol, and equal ones for the same.
                    torch._dynamo.maybe_mark_dynamic(value, axis)
            with torch.no_grad():
                return compiled(*given, **named)

        return call


@dataclass(frozen=True)
class CacheRecipe:
    """The model of a cache. code: class of each module that is not torch's own -> digest of its source, without
    comments and docstrings.  tensors: parameter or buffer -> 'float32 [10, 64]'.  threads: of torch, which the kernels
    of a CPU are generated for.  device: 'cpu' or 'cuda'.  probes: as `record_probes` has them.
    requires: the machines and installations that it fits.
    """

    options: CompileOptions
    device: str
    threads: int
    code: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, bool] = field(default_factory=dict)
    requires: tuple[Requirement, ...] = ()

    @classmethod
    def of_model(cls, model: "torch.nn.Module", options: CompileOptions, device: str) -> "CacheRecipe":
        """The recipe of a model in this process."""
        import torch

        kinds = {type(part) for part in model.modules() if not type(part).__module__.startswith("torch.")}
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return cls(
            options,
            device,
            torch.get_num_threads(),
            {kind.__qualname__: _digest_class(kind) for kind in kinds},
            {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in tensors.items()},
        )

    def differences(self, model: "torch.nn.Module") -> Iterator[str]:
        """What differs in a model of this process, in words."""
        here = self.of_model(model, self.options, self.device)
        if self.device == "cpu" and here.threads != self.threads:
            yield (
                f"its kernels are for {self.threads} threads, and torch has {here.threads}: "
                f"torch.set_num_threads({self.threads}), or OMP_NUM_THREADS={self.threads}"
            )
        yield from _differing("class", self.code, here.code)
        yield from _differing("tensor", self.tensors, here.tensors)


def _differing(kind: str, made: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*made} | {*here}):
        if made.get(name) == here.get(name):
            continue
        if name not in made or name not in here:
            yield f"{kind} {name} is {'new' if name in here else 'gone'}"
        else:
            yield f"{kind} {name} " + (
                "has other source" if kind == "class" else f"was {made[name]} and is {here[name]}"
            )


def _digest_class(kind: type) -> str:
    """The digest of a class's syntax tree; of its names where there is no source, as in an interactive session."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return digest_of(sorted(vars(kind)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return digest_of(ast.dump(tree))


# The zip. Members that lead elsewhere are refused before anything is written.

MOST_BYTES = 4 << 30
_MOST_MEMBERS = 100_000
_RECIPE, _FILES = "recipe.json", "files/"
_MEMBER = re.compile(rf"{_RECIPE}|{_FILES}(?:[\w-][\w.+-]*/){{0,8}}[\w-][\w.+-]*")
# Locks of running processes.
_LEFT_OUT = "locks"
_DATE = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path, recipe: CacheRecipe, path: Path) -> None:
    """Write the files of a cache folder and the recipe to the zip `path`; equal files give equal bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_member(_RECIPE), json.dumps(encode(recipe), sort_keys=True))
        for file in sorted(_list_files(folder)):
            archive.writestr(_member(f"{_FILES}{file.relative_to(folder).as_posix()}"), file.read_bytes())


def _member(name: str) -> zipfile.ZipInfo:
    member_info = zipfile.ZipInfo(name, _DATE)
    member_info.compress_type = zipfile.ZIP_DEFLATED
    return member_info


def _list_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and _LEFT_OUT not in file.relative_to(folder).parts:
            yield file


def unpack(data: bytes, folder: Path) -> CacheRecipe:
    """The recipe of a cache file, whose cached files are written into the empty `folder`.

    Raises IntegrityError for what is no such file: a cut one, other members, a path that leads elsewhere, too large.
    """
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            recipe = _read_recipe(archive)
            for item in archive.infolist():
                if item.filename != _RECIPE:
                    place = folder / item.filename.removeprefix(_FILES)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(item))
    except DAMAGED as error:
        raise IntegrityError(f"it is no compile cache: {error}; pull it again, or make it again") from error
    return recipe


def read_recipe(path: Path) -> CacheRecipe:
    """The recipe of a cache file, of which nothing else is read. Raises IntegrityError as `unpack`, and OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_recipe(archive)
    except DAMAGED as error:
        raise IntegrityError(f"{path} is no compile cache: {error}; measure one with --measure") from error


def _read_recipe(archive: zipfile.ZipFile) -> CacheRecipe:
    check_compression(archive)
    items = archive.infolist()
    names = [item.filename for item in items]
    if wrong := next((name for name in names if not _MEMBER.fullmatch(name)), None):
        raise IntegrityError(f"it holds {wrong[:80]!r}, which no compile cache does; do not load it")
    if _RECIPE not in names or len({*names}) != len(names) or len(names) > _MOST_MEMBERS:
        raise IntegrityError("it has no recipe, a file twice, or too many files; do not load it")
    if sum(item.file_size for item in items) > MOST_BYTES:
        raise IntegrityError(f"its files take more than {MOST_BYTES >> 30} GiB; do not load it")
    return decode(parsing.load_json(archive.read(_RECIPE)), CacheRecipe)


# Inductor's probes of vector instructions: recorded where a cache is made, and not made again where it is loaded.
#
# To learn what a CPU has, Inductor compiles a small library for each set of instructions and starts a process that
# loads it (torch 2.13, `_inductor.cpu_vec_isa.VecISA`): ten processes and a second of CPU time at each start, even
# where the libraries are there. A cache is loaded only where CPU, compiler and torch are those of the probes, so they
# hold.

_PROBE = "_probe_load"


def record_probes() -> dict[str, bool]:
    """A record that fills as this process probes: name of the library -> whether it could be loaded."""
    return _answer_probes({})


def use_probes(known: Mapping[str, bool]) -> None:
    """Have probes of this process answered from a record; one that is not on it is made."""
    _answer_probes(known)


def _answer_probes(known: Mapping[str, bool]) -> dict[str, bool]:
    from torch._inductor.cpu_vec_isa import VecISA

    probe_answers, probe = dict(known), getattr(VecISA, _PROBE, None)
    if probe is None:  # a torch that probes in another way does so
        return probe_answers

    def answer(self: object, library: str) -> bool:
        name = Path(library).name
        if name not in probe_answers:
            probe_answers[name] = bool(probe(self, library))
        return probe_answers[name]

    setattr(VecISA, _PROBE, answer)
    return probe_answers
