"""A small project on disk (an ONNX model, real-shaped data, a spec), and the command line called in this process."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

import enginesmith
from enginesmith import cli
from enginesmith.core.errors import EnginesmithError, SpecError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import load

# The int8 graph that is written by default for this machine's CPU, and the kind of int8 that is searched.
_WEIGHTS = ", 7-bit weights" if this_kind().saturates else ""
CPU_INT8 = f"int8 (uint8 activations{_WEIGHTS}, fp32 elsewhere)"
SEARCHED_INT8 = f"int8 (uint8 activations{_WEIGHTS})"
SPEC: dict[str, Any] = {
    "model": "tiny",
    "source": {"onnx": "tiny.onnx"},
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 8]}},
    "outputs": ["logits"],
    "dims": {"batch": {"min": 1, "opt": 4, "max": 8}},
    "precisions": ["fp32", "int8"],
    "targets": ["cpu", "sm_75", "sm_89"],
    "backends": {"onnxruntime": {}, "tensorrt-rtx": {}},
    "calibration": {"data": "calibration.npz"},
    "golden": {
        "data": "golden.npz",
        "labels": "label",
        "metric": {"name": "accuracy", "output": "logits", "floor": 0.9},
    },
    "validation": {"latency": "off"},
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Captured:
    """What a process has printed since it was last asked; `capture` is `capsys` for fixtures of a module."""

    def __init__(self, out: StringIO, err: StringIO) -> None:
        self._streams = out, err

    def readouterr(self) -> SimpleNamespace:
        text, err = (stream.getvalue() for stream in self._streams)
        for stream in self._streams:
            stream.seek(0)
            stream.truncate()
        return SimpleNamespace(out=text, err=err)


@contextmanager
def capture() -> Iterator[Captured]:
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as err:
        yield Captured(output, err)


class Project:
    """A folder with a spec, and a registry beside it."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str] | Captured | None = None) -> None:
        self.folder = folder
        self.spec = folder / "tiny.yaml"
        self.registry = folder.parent / "registry"
        self._capture = capture

    def run(self, *words: object) -> Result:
        """Call the command line; `--registry` is added. Each step that began has an end, unless the command fails."""
        assert self._capture is not None
        self._capture.readouterr()
        code = exit_code(*words, "--registry", self.registry)
        captured_namespace = self._capture.readouterr()
        result = Result(code, captured_namespace.out, captured_namespace.err)
        start_matches = re.findall(r"^\[ *[\d.]+ s\] (.*?) \.\.\.", result.err, re.MULTILINE)
        assert result.code or [name for name in start_matches if f" s] {name}: " not in result.err] == [], result.err
        return result

    def build(self, *words: object) -> Result:
        return self.run("build", self.spec, "--json", *words)

    @property
    def store(self) -> Store:
        return open_store(self.registry)

    def published(self) -> tuple[Store, Manifest]:
        """The registry, and what it holds of version 1."""
        return self.store, load(self.store, "tiny", "1")

    def page(self) -> str:
        return (self.registry / "models" / "tiny" / "versions" / "1" / "report.html").read_text()

    def change_spec(self, **parts: Any) -> None:
        """Replace top-level keys; None removes one. Engines are timed only where a test asks for it."""
        if "validation" in parts:
            parts["validation"] = {"latency": "off", **parts["validation"]}
        spec = {**yaml.safe_load(self.spec.read_text()), **parts}
        self.spec.write_text(yaml.safe_dump({key: value for key, value in spec.items() if value is not None}))


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def exit_code(*words: object) -> int:
    """What the command line ends with, on a registry that nobody names."""
    with pytest.raises(SystemExit) as error:
        cli.main([*map(str, words)])
    return int(error.value.code or 0)


def assert_refused(spec: Path, message: str, error: type[EnginesmithError] = SpecError) -> str:
    """Have a build of this spec, in a folder beside its registry, publish nothing; the error, which says `message`."""
    registry = spec.parent.parent / "registry"
    with pytest.raises(error, match=re.escape(message)) as failure:
        enginesmith.build(spec, registry=registry)
    assert not (registry / "models").exists()
    return str(failure.value)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    drawn_fields = {"w1": rng.normal(size=(8, 16)), "b1": rng.normal(size=16), "w2": rng.normal(size=(16, 10))}
    return {name: value.astype(np.float32) for name, value in drawn_fields.items()}


def write_model(path: Path, values: dict[str, np.ndarray]) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        tiny (float[batch, 8] x) => (float[batch, 10] logits) {
            hidden = MatMul(x, w1)
            biased = Add(hidden, b1)
            active = Relu(biased)
            logits = MatMul(active, w2)
        }
        """
    )
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    onnx.save(model, path)


def answers(values: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ values["w1"] + values["b1"], 0) @ values["w2"]


def write_data(folder: Path, seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    golden = rng.normal(size=(24, 8)).astype(np.float32)
    np.savez(folder / "calibration.npz", x=rng.normal(size=(64, 8)).astype(np.float32))
    np.savez(folder / "golden.npz", x=golden, label=answers(weights(), golden).argmax(-1))


def write_project(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_model(folder / "tiny.onnx", weights())
    write_data(folder)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False))


def units(outcome: Any, key: str) -> dict[str, Any]:
    return {f"{e['target']} {e['precision']}": e[key] for e in outcome["engines"]}


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored_arrays:
        return dict(stored_arrays)


def rebuilt(outcome: Any) -> set[str]:
    """Units whose engine was built in this run."""
    return {name for name, seconds in units(outcome, "seconds").items() if seconds > 0}
