from pathlib import Path

import pytest

from tests.pipeline.projects import Project, rebuilt


def blob(built: Project, unit: str) -> Path:
    engines = built.run("show", "tiny", "--json").json["engines"]
    digest = next(e["digest"] for e in engines if f"{e['target']} {e['precision']}" == unit)
    return built.registry / "blobs" / "sha256" / digest[:2] / digest


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[:-1])
    if how == "link":
        outer_path = file.parents[4] / "outside"
        outer_path.write_bytes(data)
        file.symlink_to(outer_path)


@pytest.mark.parametrize("how", ["missing", "cut", "link"])
def test_a_cached_build_builds_a_damaged_engine_again(built: Project, how: str) -> None:
    file = blob(built, "cpu int8")
    damage(file, how)
    planned_actions = {
        f"{u['target']} {u['precision']}": u["action"] for u in built.run("plan", built.spec, "--json").json["units"]
    }
    assert planned_actions["cpu int8"] == "build" and planned_actions["cpu fp32"] == "cached"
    result = built.build()
    assert result.code == 0 and rebuilt(result.json) >= {"cpu int8"}
    assert file.is_file() and not file.is_symlink()
    assert built.run("registry", "fsck", "tiny").code == 0
    assert built.run("promote", "tiny", "tiny:stable", "--proven-only").code == 0


def test_a_pull_gives_the_reason_for_another_engine(built: Project, tmp_path: Path) -> None:
    damage(blob(built, "cpu int8"), "missing")
    result = built.run("pull", "tiny", "--target", "cpu", "--dest", tmp_path / "engines", "--json")
    assert result.code == 0 and result.json["precision"] == "fp32"
    assert "LOST: cpu int8 onnxruntime: published, but its file is missing" in result.err
    assert [item["unit"] for item in result.json["lost"]] == ["cpu int8 onnxruntime"]
    refused_result = built.run("promote", "tiny", "tiny:stable", "--proven-only")
    assert refused_result.code == 1 and "tiny@1 is damaged; restore it, or build again" in refused_result.err
    assert "to repair engines, build again; restore other files" in built.run("registry", "fsck").err
