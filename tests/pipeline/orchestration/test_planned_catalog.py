import shutil
from pathlib import Path

import pytest
import yaml

from enginesmith.registry.store.layout import registered_key
from pipeline.orchestration import catalog
from pipeline.orchestration.catalog import gather_specs, spec_files
from tests.ensembles import write_ensemble
from tests.pipeline.projects import Project


def plan(project: Project, place: Path) -> dict[str, dict[str, object]]:
    """The rows of `plan --all`, by folder."""
    result = project.run("plan", "--all", place, "--json")
    rows = {Path(row["spec"]).parent.name: row for row in result.json}
    assert result.code == int(any(row["reason"] for row in rows.values()))
    return rows


@pytest.fixture
def place(built: Project) -> Path:
    """A model that is built, and a spec that cannot be read."""
    place = built.folder.parent / "catalog"
    for name in ("there", "wrong"):
        shutil.copytree(built.folder, place / name)
    (place / "wrong" / "tiny.yaml").write_text("model: wrong\nsource: {onnx: none.onnx}\n")
    return place


def test_recorded_units_are_reported_for_every_spec(built: Project, place: Path) -> None:
    rows, units = plan(built, place), built.run("plan", built.spec, "--json").json["units"]
    expected = {action: sum(unit["action"] == action for unit in units) for action in ("cached", "refused")}
    assert rows["there"]["units"] == {action: count for action, count in expected.items() if count}
    assert rows["wrong"]["units"] == {} and "inputs: is missing" in str(rows["wrong"]["reason"])
    assert plan(built, place) == rows, "with the copies that the first plan wrote"
    result = built.run("plan", "--all", place / "there")
    assert result.code == 0 and f"1 spec: 1 with nothing to do; {len(units)} units" in result.err
    folded_output = built.run("plan", "--all", place).out  # a cell, which continues on the next line
    assert "missing; add it" in " ".join(folded_output.split())


def test_a_lost_engine_is_built_and_a_lost_graph_unknown_despite_copies(built: Project, place: Path) -> None:
    units_before = plan(built, place)["there"]["units"]
    store = built.store
    for key in list(store.list("records/build/"))[:1]:
        store.remove(key)
    assert plan(built, place)["there"]["units"] == {**units_before, "cached": units_before["cached"] - 1, "build": 1}
    for key in list(store.list("records/quantize/")):
        store.remove(key)
    row = plan(built, place)["there"]
    assert "unknown" in row["units"] and row["missing"]


def test_processes_share_the_specs_and_rows_keep_their_order(built, place, monkeypatch):
    single_plan = plan(built, place)
    monkeypatch.setattr(catalog, "LEAST_SHARE", 1)
    assert built.run("plan", "--all", place, "--json", "--jobs", "2").json == [*single_plan.values()]


def test_an_ensemble_is_one_row_with_the_units_of_its_graphs(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path / "project").parent
    options = catalog.RunOptions(str(tmp_path / "registry"))
    [row] = catalog.plan_catalog([str(folder / "pair.yaml")], options)
    assert (row.model, row.reason, row.units) == ("pair", "", {"unknown": 6})
    assert row.missing[0] == "encoder: golden data of encoder"


def test_a_catalog_lists_registered_specs(project: Project) -> None:
    result = project.run("build", "--all", "registered")
    assert result.code == 3 or "no spec is registered" in result.err
    project.run("prefect", "register", project.spec, "--no-event")
    with gather_specs("registered", str(project.registry)) as specs:
        assert [address.partition("@")[0] for address in specs] == ["registered:tiny"]
    project.store.replace(registered_key("another"), b"damaged", None)
    with gather_specs("registered", str(project.registry)) as specs:
        assert [address.partition("@")[0] for address in specs] == ["registered:another", "registered:tiny"]


def test_only_yaml_with_a_model_counts_as_a_spec(project: Project) -> None:
    (project.folder / "other.yaml").write_text(yaml.safe_dump({"deployments": [{"model": 1}]}))
    (project.folder / "broken.yaml").write_text("model: [\n")
    (project.folder / ".hidden.yaml").write_text("model: x\n")
    assert [path.name for path in spec_files(project.folder)] == ["broken.yaml", "tiny.yaml"]
