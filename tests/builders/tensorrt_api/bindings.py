"""The public names of TensorRT's Python bindings, read from the bindings wheels alone: no TensorRT and no GPU.

The wheels hold one extension module that wants three shared objects of TensorRT. Nine C functions that give nothing
back are enough to import it, and its classes can then be listed; nothing can be called.

    python -m tests.builders.tensorrt_api.bindings FOLDER_OF_WHEELS > tests/builders/tensorrt_api/names.txt

lists the wheels of the folder (`pip download --no-deps tensorrt-cu13-bindings==11.4.0.106` fetches one; those for this
Python) together with the TensorRT-RTX that is installed, each name with the releases that have it.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
FUNCTIONS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
NAMES = Path(__file__).with_name("names.txt")
_PYBIND = ("pybind11_builtins.", "builtins.")


def public_names(module: object) -> list[str]:
    """'Class', 'Class.attribute', 'Class.Enum.MEMBER' of everything public."""
    items = []
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, type(sys)):
            continue
        items.append(name)
        if isinstance(value, type):
            items += [f"{name}.{inner_text}" for inner_text in _of_class(value)]
    return sorted(items)


def _of_class(cls: type) -> Iterable[str]:
    for name in dir(cls):
        if name.startswith("_") or name in dir(object):
            continue
        yield name
        inner_var = vars(cls).get(name)
        if isinstance(inner_var, type):
            yield from (f"{name}.{member}" for member in dir(inner_var) if not member.startswith("_"))


def names_in_wheel(wheel: Path) -> list[str]:
    """The names of a bindings wheel, imported over stubs in a process of its own. Needs a C compiler."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
        major = version_of(wheel).split(".")[0]
        _stub(root, [f"lib{library}.so.{major}" for library in LIBRARIES])
        code = (
            "import json, tensorrt_bindings\n"
            "from tests.builders.tensorrt_api.bindings import public_names\n"
            "print(json.dumps(public_names(tensorrt_bindings)))"
        )
        places = os.pathsep.join([folder, *map(str, sys.path)])
        environment = {**os.environ, "PYTHONPATH": places, "LD_LIBRARY_PATH": folder}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise ImportError(f"{wheel.name}: {result.stderr.strip().splitlines()[-1]}")
        return json.loads(result.stdout)


def version_of(wheel: Path) -> str:
    """'11.4.0.106'."""
    return wheel.name.split("-")[1]


def _stub(folder: Path, names: Iterable[str]) -> None:
    source = folder / "stub.c"
    source.write_text("".join(f"void *{function}() {{ return 0; }}\n" for function in FUNCTIONS))
    for name in names:
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True)


def recorded() -> dict[str, frozenset[str]]:
    """The committed list: release -> its names."""
    releases: dict[str, set[str]] = {}
    current_names: list[set[str]] = []
    for line in NAMES.read_text().splitlines():
        if result := re.fullmatch(r"\[(.+)\]", line):
            current_names = [releases.setdefault(release, set()) for release in result[1].split(", ")]
        elif line and not line.startswith("#"):
            owner, _, members = line.partition(": ")
            for item in current_names:
                item |= {owner} if not members else {f"{owner}.{member}" for member in members.split()}
    return {release: frozenset(names) for release, names in releases.items()}


def written(names: Mapping[str, Iterable[str]]) -> str:
    """The list as text: a part for every set of releases that share names."""
    releases = {name: frozenset(item) for name, item in names.items()}
    parts: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(set().union(*releases.values())):
        parts.setdefault(tuple(release for release, item in releases.items() if name in item), []).append(name)
    lines = ["# Names of TensorRT's Python bindings; written by tests/builders/tensorrt_api/bindings.py."]
    for owners in sorted(parts, key=lambda key: (-len(key), key)):
        lines += ["", f"[{', '.join(owners)}]", *_grouped(parts[owners])]
    return "\n".join(lines) + "\n"


def _grouped(names: Iterable[str]) -> list[str]:
    plain_names, members = [], dict[str, list[str]]()
    for name in names:
        owner, _, member = name.rpartition(".")
        if owner:
            members.setdefault(owner, []).append(member)
        else:
            plain_names.append(name)
    return plain_names + [f"{owner}: {' '.join(item)}" for owner, item in members.items()]


def main(folder: Path) -> None:
    if shutil.which("cc") is None:
        sys.exit("a C compiler (cc) is needed")
    names = {version_of(wheel): names_in_wheel(wheel) for wheel in sorted(folder.glob("tensorrt_*bindings-*.whl"))}
    rtx = importlib.import_module("tensorrt_rtx")
    names[f"rtx {rtx.__version__}"] = public_names(rtx)
    print(written(names), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
