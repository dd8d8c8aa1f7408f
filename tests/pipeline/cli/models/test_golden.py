import re

import numpy as np
import pytest
import yaml

from enginesmith.core.errors import InputError
from pipeline.compile.publication.publish import resolved_spec
from pipeline.operations.golden import write_frozen
from pipeline.spec.model import load_spec
from tests.pipeline.projects import SPEC, Project, arrays, weights, write_data, write_model


def test_a_stale_golden_set_fails_the_build_until_the_change_is_accepted(built: Project) -> None:
    built.spec.write_text("# kept as it is\n" + built.spec.read_text())
    first_result = built.run("debug", "golden", "accept", built.spec, "--json")
    assert first_result.code == 0, first_result.err
    assert load_spec(built.spec).golden.frozen == first_result.json["digest"]
    assert built.spec.read_text().startswith("# kept as it is\n")
    assert "cached" in built.run("debug", "golden", "make", built.spec).err
    write_model(built.folder / "tiny.onnx", weights() | {"w2": weights()["w2"] * np.float32(1.25)})
    stale_result = built.run("build", built.spec)
    assert stale_result.code == 2
    assert re.search(r"of 9 cases have other expected outputs; logits: by up to \d", stale_result.err)
    assert f"enginesmith debug golden accept {built.spec}" in stale_result.err
    json = built.run("debug", "golden", "accept", built.spec, "--json").json
    assert json["before"] == first_result.json["digest"] and "other expected outputs" in json["change"]
    assert built.run("debug", "golden", "make", built.spec).code == 0
    message = built.run("debug", "golden", "diff", "tiny@1", json["digest"], "--json").json
    assert (message["same"], message["inputs"], len(message["expected"])) == (False, [], 9)


def test_changes_of_an_unfrozen_golden_set_are_reported(built: Project) -> None:
    write_data(built.folder, seed=5)
    result = built.run("debug", "golden", "make", built.spec)
    assert result.code == 0 and "golden set: changed since the last run: " in result.err
    assert "cases have other inputs" in result.out
    second_result = built.run("debug", "golden", "make", built.spec, "--json")
    assert "changed" not in second_result.err and second_result.json["change"] is None


def test_golden_data_in_a_folder_is_read_and_its_changes_are_detected(project: Project) -> None:
    (project.folder / "samples").mkdir()
    data = arrays(project.folder / "golden.npz")
    for name, array in data.items():
        np.save(project.folder / "samples" / f"{name}.npy", array)
    golden = {"data": "samples", "labels": "label"}
    project.change_spec(golden=golden, precisions=["fp32"], targets=["cpu"], calibration=None)
    assert project.build().code == 0 and "cached" in project.run("debug", "golden", "make", project.spec).err
    np.save(project.folder / "samples" / "x.npy", data["x"] + 1)
    assert "cases have other inputs" in project.run("debug", "golden", "make", project.spec).out
    assert "golden data samples changed" in project.run("plan", project.spec).out


def test_show_lists_the_golden_set_and_its_users(built: Project) -> None:
    message = built.run("debug", "golden", "show", "tiny", "--json").json
    assert message["versions"] == ["tiny@1"]
    assert [case["kind"] for case in message["cases"]].count("golden") == 6
    assert built.run("debug", "golden", "show", message["digest"][:12]).out.startswith(message["digest"])
    assert built.run("debug", "golden", "diff", "tiny", message["digest"]).out.endswith(": the same golden set\n")
    assert built.run("debug", "golden", "show", "a" * 64).code == 2


@pytest.mark.parametrize("flow", [True, False])
def test_freezing_changes_one_entry_of_the_spec(project: Project, flow: bool) -> None:
    text = yaml.safe_dump({**SPEC}, sort_keys=False)
    if flow:
        text = yaml.safe_dump({**SPEC, "golden": None}, sort_keys=False).replace(
            "golden: null", "golden: {data: golden.npz}  # real"
        )
    project.spec.write_text(text)
    for digest in ("a" * 64, "b" * 64):
        write_frozen(project.spec, digest)
        assert load_spec(project.spec).golden.frozen == digest
        remaining_text = re.sub(r'frozen: "b{64}"(, |\n *)', "", project.spec.read_text())
    assert remaining_text == text
    assert not list(project.folder.glob(".*.new"))


def test_freezing_makes_no_new_version(project: Project) -> None:
    spec_before = resolved_spec(load_spec(project.spec))
    write_frozen(project.spec, "a" * 64)
    assert resolved_spec(load_spec(project.spec)) == spec_before


def test_a_spec_without_golden_data_has_nothing_to_freeze(project: Project) -> None:
    project.change_spec(golden=None)
    with pytest.raises(InputError, match="golden"):
        write_frozen(project.spec, "a" * 64)
