import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

from enginesmith.cli import _CLIENT_EXTRAS, _EXTRAS, extra_of

ROOT = Path(__file__).parents[3]
OURS = ("enginesmith", "builders", "validation", "pipeline")
# Each import has a line of its own (ruff), and parsing all files takes 3 s.
IMPORTS = re.compile(r"^ *(?:from (\w[\w.]*) import\b|import (\w[\w.]*)(?: as \w+)?(?: *#.*)?$)", re.MULTILINE)
# Distributions of modules that need not be installed where tests run; of others the installed files say it.
DISTRIBUTIONS = {
    "iree": "iree-base-runtime", "jax": "jax", "pynvml": "nvidia-ml-py", "tensorrt": "tensorrt", "tvm": "apache-tvm",
    "tvm_ffi": "apache-tvm-ffi", "tensorrt_rtx": "tensorrt-rtx",
}  # fmt: skip
# For type checkers alone.
ELSEWHERE = {"_typeshed"}


def imported() -> Iterator[str]:
    for root in OURS:
        for file in (ROOT / root).rglob("*.py"):
            yield from ("".join(names) for names in IMPORTS.findall(file.read_text()))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def brought_by(extra: str) -> frozenset[str]:
    """The distributions that an extra of ours installs; '' is no extra. As far as they are installed."""
    distribution = "enginesmith" if extra in _CLIENT_EXTRAS else "enginesmith-pipeline"
    visited_extras, todo_distributions = set[tuple[str, str]](), [(distribution, extra)]
    while todo_distributions:
        name, expected = todo_distributions.pop()
        if (plain(name), expected) in visited_extras:
            continue
        visited_extras.add((plain(name), expected))
        try:
            needed_requirements = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in needed_requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": expected}):
                todo_distributions += [(requirement.name, more_text) for more_text in ("", *requirement.extras)]
    return frozenset(name for name, _ in visited_extras)


def distributions_of(module: str) -> set[str]:
    package = module.split(".")[0]
    if package == "google":  # a namespace of many distributions
        return {"google-cloud-storage" if extra_of(module) == "gcs" else "protobuf"}
    return set(map(plain, installed().get(package, [DISTRIBUTIONS.get(package, package)])))


@cache
def installed() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def test_every_import_belongs_to_its_named_extra() -> None:
    wrong_types = {}
    our_names = {*sys.stdlib_module_names, *OURS}
    for module in {name for name in imported() if name.split(".")[0] not in our_names}:
        distributions = distributions_of(module)
        extra_text = extra_of(module)
        if module.split(".")[0] not in ELSEWHERE and not distributions & brought_by(extra_text or ""):
            wrong_types[module] = extra_text
    assert not wrong_types, "name the extra in enginesmith.cli._PACKAGES"


def test_every_package_in_the_table_is_in_its_extra() -> None:
    assert {name: extra for name, extra in _EXTRAS.items() if not distributions_of(name) & brought_by(extra)} == {}


def test_every_extra_in_a_message_exists() -> None:
    extras = {
        path: set(importlib.metadata.metadata(name).get_all("Provides-Extra") or ())
        for path, name in (("./enginesmith", "enginesmith"), (".", "enginesmith-pipeline"))
    }
    assert extras["./enginesmith"] >= _CLIENT_EXTRAS
    for root in (*OURS, "docs", "README.md"):
        place = ROOT / root
        for file in (place,) if place.is_file() else (*place.rglob("*.py"), *place.rglob("*.md")):
            for path, names in re.findall(r"""["'](\./enginesmith|\.)\[([a-z,]+)\]["']""", file.read_text()):
                assert set(names.split(",")) <= extras[path], f"{file}: {path}[{names}]"
