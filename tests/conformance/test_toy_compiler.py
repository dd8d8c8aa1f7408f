"""A compiler that Enginesmith has never heard of, in a distribution of its own, is known everywhere by its entry point.

`toy_compiler/` is built as a wheel and installed into a folder on PYTHONPATH; nothing of Enginesmith changes. Each test
is one place that shows a backend or decides by it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

from enginesmith.core.errors import digest_of_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("toy_compiler")
SPEC = {
    "model": "iris",
    "source": {"onnx": "iris.onnx"},
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 4]}},
    "dims": {"batch": {"min": 1, "opt": 4, "max": 8}},
    "precisions": ["fp32", "bf16"],
    "targets": ["cpu"],
    "backends": {"toy": {"fold": False}, "onnxruntime": {}},
    "validation": {"latency": "off"},
}
INVENTORY = {"groups": [{"product": "cpu", "count": 3}]}
CATALOG = {"serve": [{"model": "iris", "on": ["cpu"]}]}


@dataclass(frozen=True)
class World:
    """A folder with a spec, and a registry beside it. site: where the toy is installed."""

    folder: Path
    site: Path

    def run(self, *words: object, toy: bool = True, code: int = 0) -> str:
        """What `enginesmith WORDS` prints, in a process that can import the toy or not."""
        ended_call = call(["-m", "enginesmith", *map(str, words)], self.folder, self.site if toy else None)
        assert ended_call.returncode == code, ended_call.stderr
        return ended_call.stdout

    def json(self, *words: object, toy: bool = True, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", toy=toy, code=code))


def call(words: Sequence[str], folder: Path, site: Path | None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, filter(None, (site, ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "ENGINESMITH_REGISTRY": str(folder / "registry"), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The toy, built and installed without an index, and a model."""
    folder, names = tmp_path_factory.mktemp("toy"), ["-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    wheel, site = ["pip", "wheel", *names, "--no-build-isolation", "-w", "wheels", SOURCE], folder / "site"
    subprocess.run([sys.executable, "-m", *wheel], cwd=folder, check=True)
    (wheel_path,) = (folder / "wheels").glob("*.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", *names, "--target", site, wheel_path], check=True)
    write_project(folder / "project")
    return World(folder / "project", site)


def write_project(folder: Path) -> None:
    folder.mkdir()
    text = "iris (float[batch, 4] x) => (float[batch, 3] y) { h = Gemm(x, a, b) r = Relu(h) y = MatMul(r, c) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    rng = np.random.default_rng(0)
    for name, shape in (("a", (4, 8)), ("b", (8,)), ("c", (8, 3))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    onnx.save(model, folder / "iris.onnx")
    for name, value in (("iris", SPEC), ("inventory", INVENTORY), ("catalog", CATALOG)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value, sort_keys=False))


@pytest.fixture(scope="module")
def published(world: World) -> World:
    """The model's first version, with an engine of the toy and one of ONNX Runtime."""
    outcome = world.json("build", "iris.yaml")
    assert outcome["version"] == "1"
    return world


def unit(items: Sequence[Any], precision: str = "fp32") -> Any:
    """The one of these that is about the toy's unit."""
    (result,) = [item for item in items if item["precision"] == precision and item["backend"] == "toy"]
    return result


def test_the_toy_compiler_passes_the_conformance_suite(world):
    suite = ROOT / "tests/conformance/test_backends.py"
    words = ["-q", "-m", "", "-p", "no:xdist", "-p", "no:cacheprovider", str(suite), "-k", "toy or import_no_compiler"]
    ended_call = call(["-m", "pytest", *words], world.folder, world.site)
    assert ended_call.returncode == 0, ended_call.stdout
    assert f"{suite.read_text().count('def test_')} passed" in ended_call.stdout, "all of the suite has been run on it"


def test_backends_lists_it_with_what_it_builds_and_its_options(world):
    (row,) = world.json("backends", "list", "toy")["backends"]
    assert row["versions"] == {"toy-compiler": "1.0.0"} and row["runs"] == ["cpu"] and row["determinism"] == "bytes"
    assert row["builds"]["cpu"] == ["fp32", "fp16", "int8"] and row["dynamic"] and not row["tunes_on_target"]
    assert row["meanings"]["fold"].startswith("whether nodes that only weights go into are computed once")
    assert "\ntoy " in world.run("backends", "list") and "\ntoy " not in world.run("backends", "list", toy=False)


def test_doctor_says_what_it_builds_for(world):
    result = {item["subject"]: item for item in world.json("doctor")["findings"]}
    assert result["toy"]["state"] == "ok" and result["toy"]["detail"] == "1.0.0; builds for cpu"
    assert "toy" not in {item["subject"] for item in world.json("doctor", toy=False)["findings"]}


def test_plan_lists_what_it_builds_and_refuses(world):
    planned_units = world.json("plan", "iris.yaml")["units"]
    assert unit(planned_units)["action"] in ("build", "cached")
    refused = unit(planned_units, "bf16")
    assert refused["action"] == "refused" and refused["reason"] == "toy has no bf16; use one of fp32, fp16, int8"


def test_without_it_a_spec_with_its_name_is_refused_at_the_line(world):
    ended = call(["-m", "enginesmith", "plan", "iris.yaml"], world.folder, None)
    assert ended.returncode == 2 and "iris.yaml:" in ended.stderr and "'toy' is not known" in ended.stderr


def test_build_proves_and_publishes_its_engine(published):
    shown_document = published.json("show", "iris")
    entry = unit(shown_document["engines"])
    assert entry["status"] == "proven on random inputs" and entry["options"] == {"fold": False}
    assert entry["toolchain"]["toy-compiler"] == "1.0.0" and entry["toolchain"]["enginesmith-toy"] == "1"


def resolved(world: World, *words: str, toy: bool = True) -> tuple[list[Any], dict[str, str]]:
    """The candidates, best first, and why each of the others is none."""
    result = world.json("pull", "--explain", "iris", *words, toy=toy)
    return result["candidates"], {item["unit"]: item["reason"] for item in result["rejected"]}


def test_resolve_chooses_it_if_its_runtime_fits_and_gives_the_reason_otherwise(published):
    first, *_ = resolved(published)[0]
    assert first["unit"] == "cpu fp32 toy" and first["remarks"] == []
    candidates, rejected = resolved(published, "--target", "cpu", "--runtime", "toy-compiler=0.9")
    assert [item["unit"] for item in candidates] == ["cpu fp32 onnxruntime"]
    assert rejected["cpu fp32 toy"] == "needs toy-compiler 1.0.0, found 0.9"


def test_resolve_reports_a_missing_runtime(published):
    """In a process that cannot import it: nothing but the manifest tells what the engine needs."""
    result = {item["unit"]: item for item in resolved(published, toy=False)[0]}
    assert result["cpu fp32 toy"]["remarks"] == ["needs toy-compiler 1.0.0; it is not installed here"]


def test_pull_downloads_its_engine_or_another_that_runs(published, tmp_path):
    pulled_document = published.json("pull", "iris", "--dest", tmp_path)
    path = Path(pulled_document["path"])
    assert path.name == "iris-1-cpu-fp32-toy.toy" and digest_of_file(path) == pulled_document["digest"]
    needs = {item["kind"]: item for item in json.loads(Path(pulled_document["description"]).read_text())["requires"]}
    assert needs.keys() == {"cpu", "runtime"} and needs["runtime"]["name"] == "toy-compiler"
    document = published.json("pull", "iris", "--dest", tmp_path, "--target", "cpu", "--runtime", "toy-compiler=0.9")
    assert document["backend"] == "onnxruntime"
    assert {"unit": "cpu fp32 toy", "reason": "needs toy-compiler 1.0.0, found 0.9"} in document["rejected"]


def test_fleet_shows_where_it_serves(published):
    sources = ("--inventory", "inventory.yaml", "--catalog", "catalog.yaml")
    assert "cpu fp32 toy" in published.run("fleet", *sources, "--runtime", "toy-compiler=1.0.0")
    other_result = published.run("fleet", *sources, "--runtime", "toy-compiler=0.9")
    assert "cpu fp32 onnxruntime" in other_result and "cpu fp32 toy" not in other_result


def test_compare_times_it_beside_another(published):
    words = ("iris.yaml", "--target", "cpu", "--precision", "fp32", "--backend", "toy,onnxruntime")
    result = published.json("backends", "compare", *words, "--seconds", "0.02")
    engine = unit(result["engines"])
    assert engine["status"] == "proven on random inputs" and engine["median_s"] > 0
