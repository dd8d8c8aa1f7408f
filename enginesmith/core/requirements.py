"""The requirements of engines on machines, as data; constraints on the fields of documents."""

import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, get_args, get_origin

import annotated_types
from annotated_types import Ge, Interval, Le, doc

from enginesmith.core.errors import Digest, canonical_json

# Tests of plain JSON values by their types and annotated-types, and descriptions of expected values for errors.
#
# `Annotated[float, Ge(0)]` limits a value; the `doc` of `Annotated[str, Predicate(is_digest), doc("a SHA-256 in
# hexadecimal")]` describes the expected value in errors (docs/decisions/0028-annotated-types.md).

# JSON values without fixed fields, which the codec does not convert; and a JSON object whose keys are data.
if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Annotated[Any, "as it is"]
JsonObject: TypeAlias = Mapping[str, Json]
# A whole number that other programs can represent too; and a number of seconds, bytes or the like.
MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Interval(ge=0, le=MAX_COUNT), doc(f"a whole number from 0 to {MAX_COUNT}")]
Amount = Annotated[float, Ge(0.0), Le(float(MAX_COUNT)), doc(f"a number from 0 to {MAX_COUNT}")]
UNIONS = (typing.Union, UnionType)
Accepts: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True)
class Format:
    """Metadata of a document's format field. The field is required and read first: a document of a newer format than
    `newest` raises NewerFormatError, whatever else it contains."""

    newest: int


@cache
def acceptor(kind: object) -> Accepts | None:
    """A function that tests whether data is a value of a type without conversion; None if the type needs one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (str, int, bool, None, NoneType):
        plain_type = NoneType if kind is None else kind
        return lambda data: type(data) is plain_type
    if kind == Json:
        return lambda _: True
    if kind == Count:  # the commonest numbers in documents
        return lambda data: type(data) is int and 0 <= data <= MAX_COUNT
    if origin is Literal:
        literals = {(type(literal), literal) for literal in arguments}
        return lambda data: isinstance(data, str | int | None) and (type(data), data) in literals
    if origin is Annotated and (base_acceptor := acceptor(arguments[0])):
        return _both(base_acceptor, [rule for rule, _ in rules(kind)])
    member_acceptors = [acceptor(argument) for argument in arguments] if origin in UNIONS else []
    acceptors = [accepts for accepts in member_acceptors if accepts]
    return (
        (lambda data: any(accepts(data) for accepts in acceptors))
        if acceptors and len(acceptors) == len(member_acceptors)
        else None
    )


def _both(accepts: Accepts, rules: Sequence[Accepts]) -> Accepts:
    """A function that tests data by `accepts`, then by each of `rules`."""
    if not rules:
        return accepts
    rule, *other_rules = rules
    return _both(lambda data: accepts(data) and rule(data), other_rules)


# Constraint -> its limit's name, a function from the limit to a test of values, and its description.
_LIMITS: Mapping[object, tuple[str, Callable[[Any], Accepts], str]] = {
    annotated_types.Ge: ("ge", lambda limit: lambda value: value >= limit, "at least {}"),
    annotated_types.Gt: ("gt", lambda limit: lambda value: value > limit, "above {}"),
    annotated_types.Le: ("le", lambda limit: lambda value: value <= limit, "at most {}"),
    annotated_types.Lt: ("lt", lambda limit: lambda value: value < limit, "below {}"),
    annotated_types.MinLen: ("min_length", lambda limit: lambda value: len(value) >= limit, "of at least {}"),
    annotated_types.MaxLen: ("max_length", lambda limit: lambda value: len(value) <= limit, "of at most {}"),
    annotated_types.Predicate: ("func", lambda accepts: accepts, "as {0.__name__} says"),
    Format: ("newest", lambda limit: lambda value: value == limit, "equal to {}"),
}


def rules(kind: object) -> Iterator[tuple[Accepts, str]]:
    """Each constraint of an Annotated type as a test, with its description. Raises TypeError for an unknown one."""
    for annotation in get_args(kind)[1:]:
        for constraint in annotation if isinstance(annotation, annotated_types.GroupedMetadata) else (annotation,):
            if type(constraint) in _LIMITS:
                name, make_rule, template = _LIMITS[type(constraint)]
                limit = getattr(constraint, name)
                yield make_rule(limit), template.format(limit)
            elif isinstance(constraint, annotated_types.BaseMetadata):
                raise TypeError(f"the codec has no constraint {constraint}")


_WORDS: Mapping[object, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def describe(kind: object) -> str:
    """Describe the JSON values of a type for people: 'a number, at least 0'."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(describe, arguments)))
    if origin is Annotated:
        docs = [annotation.documentation for annotation in arguments if hasattr(annotation, "documentation")]
        return docs[0] if docs else ", ".join([describe(arguments[0]), *(text for _, text in rules(kind))])
    if origin in (tuple, list, Sequence) or kind is list:
        return "a list" if origin is not tuple or arguments[-1] is ... else f"a list of {len(arguments)}"
    return _WORDS.get(kind, "an object")


# The requirements of an engine on its machine, as data in the manifest; comparison of versions.
#
# A backend lists requirements (`Backend.requires`). All other code evaluates (`hardware.evaluation`) or renders them
# and knows no compiler. A strict requirement that a machine is known not to meet rejects the engine there; any other
# only gives a remark. Versions are compared in the parts that both have: 10.16 means every 10.16.x.

Capability = tuple[int, int]
# CUDA's major version -> the oldest driver that runs it (CUDA release notes).
_DRIVER_OF_CUDA = {12: "525", 13: "580"}


def numbers(version: str) -> tuple[int, ...]:
    """A version's parts before the first that is no number of up to 18 digits: '10.16.1rc2' gives (10, 16)."""
    numeric_parts = takewhile(lambda part: part.isdecimal() and len(part) <= 18, version.split("."))
    return tuple(map(int, numeric_parts))


def same_version(built: str, here: str) -> bool:
    """Whether two versions are equal in the parts that both have ('10.16' and '10.16.1'). Other texts must be equal."""
    is_numeric = all(part.isdecimal() for part in f"{built}.{here}".split("."))
    return built == here or (is_numeric and all(a == b for a, b in zip(numbers(built), numbers(here), strict=False)))


def is_within(here: str, oldest: str, below: str) -> bool:
    """Whether a version is in [oldest, below), compared in the parts that both have; '' as `below` is no limit."""
    version, low, high = numbers(here), numbers(oldest), numbers(below)
    return low[: len(version)] <= version[: len(low)] and (not below or version[: len(high)] < high[: len(version)])


class _Strict:
    strict: ClassVar[bool] = True


@dataclass(frozen=True)
class Gpu(_Strict):
    """A GPU of a compute capability. target: the name of the build target ('l4').  capability: (major, minor).

    match: 'exact', 'family' (the same major number, and at least the minor one) or 'at_least'.
    """

    target: str
    capability: Capability
    match: str = "exact"
    kind: Literal["gpu"] = "gpu"


@dataclass(frozen=True)
class Cpu(_Strict):
    """A machine that runs models on its CPU. target: the name of the build target ('cpu').

    only: the only kind of CPU (`enginesmith.core.hardware.machine`) that runs the engine; '' means any.
    """

    target: str
    only: str = ""
    kind: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class Instructions(_Strict):
    """CPU instructions that the engine's native code uses. level: of x86-64, or an architecture.  flags: CPU flags
    beyond that level, named as in /proc/cpuinfo."""

    level: str
    flags: tuple[str, ...] = ()
    kind: Literal["instructions"] = "instructions"


@dataclass(frozen=True)
class Runtime:
    """A library that opens the engine, and its versions that can open it.

    name: of the installed distribution, as in `Machine.runtimes`.  packages: other distributions with the same version.
    version: the one that built the engine; '' if not recorded.  loads: ranges [first, below) of other versions that
    open it; '' as `below` means no upper limit. title: the name shown to users.
    remark: start of the remark on a version other than `version`: 'saved by onnxruntime'.  strict: whether a version
    outside all ranges rejects the engine; if not, it only causes a remark.
    """

    name: str
    version: str
    title: str = ""
    loads: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    strict: bool = True
    remark: str = ""
    kind: Literal["runtime"] = "runtime"

    @property
    def wanted_version(self) -> str:
        """The required version as shown to users: 'TensorRT 10.16.1', 'jaxlib 0.6 or later'."""
        return f"{self.title or self.name} {self.version}{' or later' if self.loads else ''}"


@dataclass(frozen=True)
class Driver(_Strict):
    """A minimum GPU driver version. cuda: the CUDA version that is compared if the driver's version is unknown."""

    version: str
    cuda: str = ""
    kind: Literal["driver"] = "driver"


@dataclass(frozen=True)
class GpuMemory(_Strict):
    """At least `size_bytes` of GPU memory."""

    size_bytes: Count
    kind: Literal["memory"] = "memory"


@dataclass(frozen=True)
class Product:
    """The product that the engine was tuned for ('l4'). warning: the remark on other products."""

    product: str
    warning: str
    kind: Literal["product"] = "product"
    strict: ClassVar[bool] = False


@dataclass(frozen=True)
class LibraryBuild:
    """One build of a library. platform: 'linux-x86_64'.  sha256: of the file.  cuda: CUDA's major version; 0 if the
    library has no GPU code."""

    platform: str
    sha256: Digest
    cuda: Count = 0


# The function that ONNX Runtime calls in a library: https://onnxruntime.ai/docs/reference/operators/add-custom-op.html
LIBRARY_ENTRY = "RegisterCustomOps"


@dataclass(frozen=True)
class Library(_Strict):
    """A shared library with operators of the engine, stored beside it under its digest. name: of the
    original file.  entry: the library's function that a runtime calls.  builds: a machine needs one that fits it."""

    name: str
    entry: str
    builds: tuple[LibraryBuild, ...]
    kind: Literal["library"] = "library"

    def build_for(self, platform: str, cuda: int) -> LibraryBuild | None:
        """The build for a platform with the newest CUDA up to a major version; None if there is none."""
        fitting_builds = [build for build in self.builds if build.platform == platform and build.cuda <= cuda]
        return max(fitting_builds, key=lambda build: build.cuda, default=None)

    def explain_absence(self, platform: str, cuda: int) -> str:
        """The reason why no build fits a machine: 'needs the library libcube.so, which ...'; '' if one fits."""
        if self.build_for(platform, cuda):
            return ""
        build_texts = [f"{build.platform}{f' with CUDA {build.cuda}' if build.cuda else ''}" for build in self.builds]
        machine_text = f"{platform}{f' with CUDA {cuda}' if cuda else ''}"
        return (
            f"needs the library {self.name}, which this version has for {', '.join(build_texts)}, and not for "
            f"{machine_text}; add one to source.libraries, and build again"
        )


@dataclass(frozen=True)
class WideSums(_Strict):
    """A CPU whose int8 kernels add in 32 bits. If they add in 16 (`CpuKind.saturates`), sums of the engine saturate."""

    kind: Literal["wide_sums"] = "wide_sums"


@dataclass(frozen=True)
class Weights(_Strict):
    """The ONNX model with the weights of a weightless engine. model: its digest; `pull` downloads it too."""

    model: str
    kind: Literal["weights"] = "weights"


@dataclass(frozen=True)
class Installation(_Strict):
    """The same installation that a compile cache was made with. facts: (name, text) from
    `hardware.evaluation.list_facts`."""

    facts: tuple[tuple[str, str], ...]
    kind: Literal["installation"] = "installation"


@dataclass(frozen=True)
class Unknown(_Strict):
    """A requirement whose kind or fields this release does not know. No machine meets it: only its engine is rejected.
    kind: its name.  text: the requirement as canonical JSON."""

    kind: str
    text: str

    def encode_json(self) -> dict[str, Any]:
        """The JSON object that was decoded."""
        return dict(json.loads(self.text))

    @classmethod
    def decode_json(cls, data: Mapping[str, Any]) -> "Unknown":
        """The unknown requirement in a JSON object, which has a `kind`."""
        return cls(data["kind"], canonical_json(data).decode())


# The requirements that a backend may list.
Hardware = Gpu | Cpu | Instructions | Driver | GpuMemory | Product
Known = Hardware | Runtime | Library | WideSums | Weights | Installation
Requirement = Known | Unknown
KINDS: dict[str, type[Known]] = {each.kind: each for each in get_args(Known)}


def hardware_of(requires: Iterable[Requirement]) -> Gpu | Cpu | None:
    """The first GPU or CPU requirement; None if there is none."""
    return next((requirement for requirement in requires if isinstance(requirement, Gpu | Cpu)), None)


class _Target(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def compute_capability(self) -> Capability | None: ...


def for_target(target: _Target, *, only: str = "") -> Gpu | Cpu:
    """The usual requirement: a GPU with the target's compute capability, or a CPU. only: the CPU's kind, '' for any."""
    if target.compute_capability is None:
        return Cpu(target.name, only)
    return Gpu(target.name, target.compute_capability)


def same_versions(toolchain: Mapping[str, str], *distributions: str) -> tuple[Runtime, ...]:
    """The usual requirement of runtimes: the same versions of these distributions that built the engine."""
    return tuple(Runtime(name, toolchain[name]) for name in distributions if name in toolchain)


def later_versions(
    toolchain: Mapping[str, str], name: str, *, strict: bool = True, remark: str = ""
) -> tuple[Runtime, ...]:
    """A runtime whose later releases open engines of earlier ones; empty if its version was not recorded.

    toolchain: distribution -> version that built the engine.
    """
    version = toolchain.get(name)
    return (Runtime(name, version, loads=((version, ""),), strict=strict, remark=remark),) if version else ()


def driver_for(toolchain: Mapping[str, str]) -> tuple[Driver, ...]:
    """The driver requirement of a GPU engine: the recorded one, else the oldest for the oldest CUDA of its wheels."""
    cuda_version = min(
        (cuda_number for cuda_number in _DRIVER_OF_CUDA for name in toolchain if f"-cu{cuda_number}" in name), default=0
    )
    driver = toolchain.get("driver") or _DRIVER_OF_CUDA.get(cuda_version)
    return (Driver(driver, str(cuda_version or "")),) if driver else ()
