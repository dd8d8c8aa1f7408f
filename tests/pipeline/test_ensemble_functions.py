import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import enginesmith
from enginesmith.core.errors import DataError, EnginesmithError, IntegrityError
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.manifest import functions_of
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.verification import verify
from enginesmith.registry.versions.lookup import load
from enginesmith.user_code import load_function
from pipeline.cli.run_options import local_context
from pipeline.intake.registration import bundle_of
from pipeline.operations.validate import validate
from pipeline.orchestration.catalog import foresee_spec
from pipeline.orchestration.run import RunOptions
from pipeline.outcome import Outcome
from pipeline.progress import Progress
from pipeline.spec.ensembles.model import load_ensemble
from tests.enginesmith.cli.commands import run
from tests.pipeline.projects import arrays, assert_refused
from tests.pipeline.test_ensemble import change, opens
from tests.reading import CODE, HEIGHT, READER, SIDE, WIDTH, draw, write_reader


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("reader")
    return folder, enginesmith.build(write_reader(folder / "project"), registry=folder / "registry")


def named_by_hand(folder: Path, image: np.ndarray) -> dict[str, Any]:
    """The answer that the graphs in fp32 and the functions give, one after the other."""
    entries: dict[str, Any] = {}
    exec((folder / "reading.py").read_text().replace("from sizes import SIDE", f"SIDE = {SIDE}"), entries)
    crops = entries["crop"](image, opens(folder / "detector.onnx")(entries["prepare"](image))["spots"])
    if not len(crops["x"]):
        return {"crops.boxes": crops["boxes"], "names.names": np.zeros(0, np.int64)}
    logits = opens(folder / "recogniser.onnx")({"x": crops["x"]})["logits"]
    return {"crops.boxes": crops["boxes"], "names.names": entries["name"](logits)["names"]}


def test_a_pulled_ensemble_answers_like_its_graphs_and_functions(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    folder, outcome = built
    expected = {"cpu fp32 ensemble": "proven", "cpu int8 ensemble": "proven"}
    assert {item.entry.unit: item.entry.status for item in outcome.engines} == expected
    pulled_engine = enginesmith.pull("reader@1", registry=folder / "registry", dest=tmp_path, precision="fp32")
    whole_description = enginesmith.Ensemble.described(opens, pulled_engine.description, functions=load_function)
    images = [*draw(np.random.default_rng(3), 20), np.zeros((HEIGHT, WIDTH), np.uint8)]
    counts = set()
    for image in images:
        result, expected_result = whole_description.run({"image": image}), named_by_hand(folder / "project", image)
        for name, array in expected_result.items():
            np.testing.assert_array_equal(result[name], array)
        counts.add(len(result["names.names"]))
    assert {0, 3} <= counts, "of no row nothing is asked; three are more than the engine takes at once"


def test_two_versions_in_one_folder_keep_their_own_code(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    registry = shutil.copytree(built[0] / "registry", tmp_path / "registry")
    store = open_store(str(registry))
    manifest = load(store, "reader", "1")
    code = store.read_blob(manifest.sources["function names reading.py"])
    code += b"\n\ndef name(logits):\n    return {'names': np.full(len(logits), 7)}\n"
    sources = {**manifest.sources, "function names reading.py": store.put_bytes(code)}
    store.create(manifest_key("reader", "2"), replace(manifest, version="2", sources=sources).to_bytes())
    pulled_engines = [
        enginesmith.pull(f"reader@{version}", registry=registry, dest=tmp_path / "engines", precision="fp32")
        for version in (1, 2)
    ]
    image = {"image": draw(np.random.default_rng(3), 1)[0]}
    names = [
        enginesmith.Ensemble.described(opens, item.description, load_function).run(image)["names.names"].tolist()
        for item in pulled_engines
    ]
    assert names[1] == [7] * len(names[0]) != names[0]
    (tmp_path / "engines" / "reader@1" / "names" / "reading.py").write_bytes(code)
    with pytest.raises(IntegrityError, match=r"has the digest .* was published; pull it again"):
        enginesmith.Ensemble.described(opens, pulled_engines[0].description, load_function)
    engine = next((tmp_path / "engines" / "reader@2" / "detector").glob("*.onnx"))
    engine.unlink()  # a link to the registry's own file
    engine.write_bytes(b"other")
    with pytest.raises(IntegrityError, match=r"has the digest .* was published; pull it again"):
        enginesmith.Ensemble.described(opens, pulled_engines[1].description, load_function)
    assert not enginesmith.pull("reader@1", registry=registry, dest=tmp_path / "engines", precision="fp32").cached
    assert enginesmith.Ensemble.described(opens, pulled_engines[0].description, load_function)


def test_code_runs_only_with_permission(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    pulled_engine = enginesmith.pull("reader@1", registry=built[0] / "registry", dest=tmp_path)
    with pytest.raises(
        DataError, match=r"runs Python code of its own \(reading\.py:crop, .*functions=enginesmith\.user_code\.load"
    ):
        enginesmith.Ensemble.described(opens, pulled_engine.description)


def test_behind_a_function_graphs_are_compared_on_its_fp32_outputs(built: tuple[Path, Outcome]) -> None:
    place = built[0] / "registry" / "models" / "reader" / "versions" / "1"
    for report in json.loads((place / "report.json").read_text())["reports"]:
        checks = report["checks"]
        judged_outputs = {item["output"] for item in checks if item["case"] == "golden" and item["name"] == "sqnr_db"}
        assert judged_outputs == {"detector.spots", "recogniser.logits"}, "what functions take; no answer of a function"
        freely = {item["output"]: item for item in checks if item["case"] == "free running"}
        assert freely.keys() == {"crops.boxes", "crops.x", "names.names", "prepare.x"}
        assert all(item["limit"] is None and 0 <= item["value"] <= 1 for item in freely.values())


@pytest.mark.slow
def test_the_version_contains_the_code_and_mirrors_completely(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    store = open_store(str(built[0] / "registry"))
    manifest = load(store, "reader", "1")
    functions = {item.name: item for item in functions_of(manifest)}
    assert functions.keys() == {"prepare", "crops", "names"}
    assert functions["crops"].files.keys() == {"reading.py", "sizes.py"}
    assert functions["crops"].sources == {"image": "image", "spots": "detector.spots"}
    other_store = open_store(str(tmp_path / "other"), create=True)
    mirror(store, [parse_reference("reader@1")], other_store)
    assert verify(other_store).sound
    pulled_engine = enginesmith.pull("reader@1", registry=tmp_path / "other", dest=tmp_path / "engines")
    assert (tmp_path / "engines" / "reader@1" / "crops" / "sizes.py").read_text() == f"SIDE = {SIDE}\n"
    assert enginesmith.Ensemble.described(opens, pulled_engine.description, load_function)
    with local_context(store, Progress()) as context:
        result = list(validate(manifest, context))
    assert [item.verdict for item in result] == ["proven", "proven"]


def test_changed_code_gives_another_version_with_a_new_proof(built: tuple[Path, Outcome], tmp_path: Path) -> None:
    path = write_reader(tmp_path / "project")
    options = RunOptions(registry=str(built[0] / "registry"))

    def actions() -> dict[str, str]:
        result = foresee_spec(str(path), options, Progress(), no_export=True)
        return {unit.precision: unit.action for unit in result.units}

    assert actions() == {"fp32": "cached", "int8": "cached"}
    (path.parent / "sizes.py").write_text(f"SIDE = {SIDE}  # the same\n")
    assert "cached" not in actions().values()
    assert {file.name for file in map(Path, bundle_of(load_ensemble(path), lambda _: "", 1 << 30).files)} >= {
        "sizes.py"
    }


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("functions/crops/function", "reading:crop", "must look like 'ocr.py:crop'"),
        ("functions/crops/function", "../reading.py:crop", "functions.crops.function"),
        ("functions/crops/function", "reading.py:gone", "has no function 'gone'"),
        ("functions/crops/function", "gone.py:crop", "'gone.py' is not a file in"),
        ("functions/detector", READER["functions"]["names"], "'detector' is a graph too"),
        ("functions/idle", READER["functions"]["names"], "function 'idle' is connected to no other"),
        ("connections/crops.spots", "recogniser.logits", "and 'recogniser' does not come before 'crops'"),
        ("connections/recogniser.x", "crops.boxes", "crops.boxes is int64 [rows, 2], and the input is float32"),
        ("connections/recogniser.x", "crops.y", "'crops' has no output 'y'"),
        ("connections/crops.spot", "detector.spots", "'crops' has no input 'spot'"),
        ("connections/prepare.image", "names.names", "and 'recogniser' does not come before 'names'"),
    ],
)
def test_invalid_connections_are_reported_with_their_key(path: str, value: Any, message: str, tmp_path: Path) -> None:
    spec = write_reader(tmp_path / "project", change(READER, path, value))
    assert_refused(spec, message)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("import numpy as np", "import no_such_module", "No module named 'no_such_module'"),
        ('return {"x": image', "raise KeyError(3)\n    return {'x': image", "function 'prepare' failed at"),
        (
            'return {"x": image[None, None].astype(np.float32) / 255}',
            "return image",
            "returned a ndarray; return a dict",
        ),
        (
            "astype(np.float32) / 255}",
            "astype(np.float64)}",
            "gave 'x' as float64 [1, 1, 16, 32]; the spec says float32",
        ),
        ('return {"x": image[None, None]', 'return {"y": image[None, None]', "function 'prepare' gave y; 'x' is wrong"),
        (
            "image[None, None]",
            "image[None]",
            "gave 'x' as float32 [1, 16, 32]; the spec says float32 [rows, 1, 16, 32]",
        ),
        ("spots[0, 0] > 0.5", "spots[0, 0] > 2", "functions before the graph returned no row for any"),
        ("def crop(image, spots):", "def crop(image):", "function 'crops' failed"),
        (
            "def crop(image, spots):",
            "def crop(image, spots):\n    import os; os._exit(3)",
            "reading.py: ended with exit status 3",
        ),
    ],
)
def test_a_failing_function_stops_the_build_with_a_sentence(built, before, after, message, tmp_path):
    assert before in CODE
    path = write_reader(tmp_path / "project", code=CODE.replace(before, after, 1))
    registry = built[0] / "registry"
    versions = {*(registry / "models" / "reader" / "versions").iterdir()}
    with pytest.raises(EnginesmithError, match=re.escape(message)):
        enginesmith.build(path, registry=registry)
    assert {*(registry / "models" / "reader" / "versions").iterdir()} == versions


def test_a_manifest_of_strange_functions_is_refused(built: tuple[Path, Outcome]) -> None:
    manifest = load(open_store(str(built[0] / "registry")), "reader", "1")
    functions = manifest.spec["functions"]
    wrong_fields: list[dict[str, Any]] = [
        {"spec": {**manifest.spec, "functions": [1]}},
        {"spec": {**manifest.spec, "functions": {"crops": {**functions["crops"], "function": 3}}}},
        {"spec": {**manifest.spec, "functions": {"crops": {**functions["crops"], "inputs": {"x": {}}}}}},
        {"spec": {**manifest.spec, "functions": {"../up": functions["crops"]}}},
        {"spec": {**manifest.spec, "functions": {"crops": {**functions["crops"], "function": "/etc/x.py:f"}}}},
        {"sources": {**manifest.sources, "function crops ../../evil.py": "0" * 64}},
    ]
    for changed_field in wrong_fields:
        with pytest.raises(IntegrityError, match=r"reader@1: .*; build it again"):
            functions_of(replace(manifest, **changed_field))


def test_show_names_the_functions(built: tuple[Path, Outcome]) -> None:
    result = run("show", f"{built[1].model}@1", "--registry", built[0] / "registry")
    assert "function crops: reading.py:crop" in result.output, result.output


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.slow
def test_labels_after_functions_cover_all_rows(built, lacking: int, tmp_path: Path) -> None:
    metric = {"name": "accuracy", "output": "names.names", "floor": 1.0}
    spec = {**READER, "golden": {"data": "golden.npz", "labels": "label", "metric": metric}}
    path = write_reader(tmp_path / "reader", spec)
    data = arrays(path.parent / "golden.npz")
    names = [named_by_hand(path.parent, image)["names.names"] for image in data["image"]]
    labels = np.full((len(names), max(map(len, names)) + 1), -1)
    for row, result in zip(labels, names, strict=True):
        row[: len(result)] = result
    first_number = int(np.flatnonzero(labels[:, 0] >= 0)[0])
    labels[first_number, 0] = -1 if lacking else labels[first_number, 0]
    np.savez(path.parent / "golden.npz", **data, label=labels)
    count = int((labels >= 0).sum())
    (engine,) = enginesmith.build(path, registry=built[0] / "registry", precisions=["fp32"]).engines
    if lacking:
        assert engine.entry.status == "failed"
        assert f"output 'names.names' gives {count + 1} answers, but there are {count} labels" in engine.entry.reason
    else:
        assert (engine.entry.status, engine.metrics) == ("proven", {"accuracy": 1.0}), engine.entry.reason
