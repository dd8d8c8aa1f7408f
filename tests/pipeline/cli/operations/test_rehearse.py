import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from enginesmith.core.errors import ConflictError, IntegrityError
from enginesmith.registry.versions import channels, lookup
from enginesmith.registry.versions.channel_state import read_channel
from tests.pipeline.cli.operations.test_check import files_of
from tests.pipeline.projects import Project, Result, capture, raising

SAME = f"onnxruntime=={version('onnxruntime')}"
WORDS = ("tiny@1", "--toolchain", SAME, "--python", sys.executable, "--seconds", "0.2")


@pytest.fixture(scope="module")
def rehearsed(built_once: Path, one_server: object, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A copy of the built project after a rehearsal, whose trials are on record, and what that said."""
    place = shutil.copytree(built_once, tmp_path_factory.mktemp("rehearsed") / "place")
    with capture() as captured:
        return place, Project(place / "project", captured).run("rehearse", *WORDS, "--json")


@pytest.mark.slow
def test_served_versions_are_rebuilt_proven_and_timed_without_publication(
    rehearsed: tuple[Path, Result], built_once: Path
) -> None:
    place, result = rehearsed
    units = {item["unit"]: item for item in result.json["units"]}
    assert list(units) == ["cpu fp32 onnxruntime", "cpu int8 onnxruntime"], result.err
    for item in units.values():
        old, new = item["old"], item["new"]
        assert (old["status"], old["sqnr_db"], old["metrics"]) == (new["status"], new["sqnr_db"], new["metrics"])
        assert new["status"] == "proven" and old["digest"] == new["digest"]
        assert old["median_s"] > 0 and new["median_s"] > 0 and item["times"]["bucket"] == "batch=4"
        assert item["verdict"] != "stays" or "times the time" in item["why"]
    assert [(plan["version"], plan["channels"]) for plan in result.json["plan"]] == [("tiny@1", ["candidate"])]
    assert files_of(place / "registry" / "models") == files_of(built_once / "registry" / "models")


@pytest.mark.slow
def test_rehearsed_versions_are_published_moved_and_rolled_back(
    rehearsed: tuple[Path, Result], tmp_path: Path, capsys, monkeypatch
) -> None:
    """The toolchain is the same here, so that the verdicts, and which unit has another one, are drawn up, and the
    measured trials come from the record. The policy of the channel `stable` asks for waves."""
    from pipeline.regressions import rehearsal, rehearsal_verdicts

    shutil.copytree(rehearsed[0], tmp_path / "place")
    built_project = Project(tmp_path / "place" / "project", capsys)
    monkeypatch.setattr(rehearsal, "judge_trials", lambda *_, **__: ("moves", ""))
    monkeypatch.setattr(rehearsal._Unit, "_prove", None)
    assert built_project.run("promote", "tiny@1", "stable", "--proven-only").code == 0
    assert built_project.run("registry", "policy", "set", "tiny:stable", "--wave", "50%,100%").code == 0
    same = built_project.run("rehearse", *WORDS, "--apply", "--json")
    assert (same.code, same.json["applied"]) == (0, []) and "have this toolchain already" in same.out
    is_upgraded = property(lambda trials: trials.unit == "cpu fp32 onnxruntime")
    monkeypatch.setattr(rehearsal_verdicts.UnitRehearsal, "is_upgraded", is_upgraded)
    second_result = f"enginesmith rehearse tiny@1 --toolchain={SAME} --seconds=0.2 --python={sys.executable} --apply"
    output = built_project.run("rehearse", *WORDS).out
    assert second_result in output and "stable: a rollout in waves 50%, 100%" in output
    (built_project.folder / "tiny.yaml").unlink()  # nothing of it is read
    for name, text in {"publish_again": "not published: lost", "promote": "candidate: not moved: lost"}.items():
        with monkeypatch.context() as patched_context:
            patched_context.setattr(rehearsal_verdicts, name, raising(IntegrityError("lost")))
            result = built_project.run("rehearse", *WORDS, "--apply")
        assert result.code == 1 and text in result.out and ("stable: a rollout" in result.out) == (name == "promote")
    result = built_project.run("rehearse", *WORDS, "--apply")
    assert result.code == 0 and "tiny@1 -> 2\n  candidate: serves 2" in result.out, result.err
    assert "enginesmith rollback tiny:candidate    # to undo it" in result.out
    assert "stable: a rollout began; `enginesmith rollout watch tiny:stable` runs it" in result.out
    store = built_project.store
    manifest_before, after = (lookup.load(store, "tiny", version) for version in ("1", "2"))
    for old_engine, new in zip(manifest_before.engines, after.engines, strict=True):
        assert (new.unit, new.status, new.digest) == (old_engine.unit, old_engine.status, old_engine.digest)
        assert (new.report != old_engine.report) == (new.unit == "cpu fp32 onnxruntime"), "the others stay as they are"
    served_versions = rehearsal.list_served(store, rehearsal.Upgrade({"onnxruntime": "9"}))
    channel_names = {manifest.reference: [channel.name for channel in peers] for manifest, peers in served_versions}
    assert channel_names == {"tiny@2": ["candidate", "stable"], "tiny@1": ["stable"]}, "nodes get both"
    second_result = built_project.run("rehearse", *WORDS, "--apply", "--json")
    refusal = "stable: cannot move until the rollout of 2 ends"
    assert (second_result.code, second_result.json["applied"]) == (1, []), "nothing is left that a channel could take"
    assert [refusal] == [note.strip() for plan in second_result.json["plan"] for note in plan["notes"]]
    for name in ("candidate", "stable"):
        assert built_project.run("rollback", f"tiny:{name}").code == 0
        channel = read_channel(store, "tiny", name)
        assert channel is not None and channel.version == "1" and not channel.active_rollout
    result = built_project.run("rehearse", *WORDS, "--apply")
    assert (
        result.code == 1 and "rolled back there; to try it again: `enginesmith promote tiny@2 tiny:cand" in result.out
    )
    assert "aborted there; to try it again: `enginesmith rollout start tiny@2 tiny:stable --proven-only`" in result.out
    for name, serving_field in {"candidate": "1", "gone": "nothing"}.items():
        with pytest.raises(ConflictError, match=f"tiny:{name} now serves {serving_field}; rehearse again"):
            rehearsal_verdicts._bring(after, after, name, "", store)
    assert rehearsal_verdicts._bring(after, manifest_before, "candidate", "", store) is False, "it serves that already"

    def move_twice(*_: object) -> None:
        channels.promote(store, after, "candidate", proven_only=True, accepted_losses=None)
        channels.rollback(store, "tiny", "candidate", by="eve")

    monkeypatch.setattr(rehearsal_verdicts, "_end_of", move_twice)
    with pytest.raises(ConflictError, match="eve moved it to 1 meanwhile"):
        rehearsal_verdicts._bring(manifest_before, after, "candidate", "", store)


def test_an_environment_with_another_version_is_refused(built: Project) -> None:
    result = built.run("rehearse", "tiny", "--toolchain", "onnxruntime==0.1", "--python", sys.executable)
    assert result.code == 2 and f"has onnxruntime {version('onnxruntime')}, not 0.1; install that there" in result.err
    bare_path = Path(sys.base_prefix) / "bin" / "python3"
    result = built.run("rehearse", "tiny", "--toolchain", SAME, "--python", bare_path)
    assert result.code == 2 and "No module named" in result.err and "install enginesmith there" in result.err


def test_a_toolchain_that_builds_nothing_here_is_named_beside_those_that_do(built: Project) -> None:
    result = built.run("rehearse", "tiny", "--toolchain", "nothing==1", "--python", sys.executable)
    assert result.code == 2 and "no served engine would change with nothing 1; they are built with" in result.err
    result = built.run("rehearse", "--toolchain", SAME, "--python", sys.executable)
    assert result.code == 2 and f"no served engine would change with {SAME.replace('==', ' ')}; they are" in result.err
    assert built.run("rehearse", "tiny", "--toolchain", "--index-url").code == 2


def test_engines_that_no_gpu_ran_are_unknown_and_move_nothing(built: Project, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.regressions.rehearsal._Unit._run", lambda *arguments: arguments[-1].run(None))
    new_text = f"tensorrt-rtx=={version('tensorrt-rtx')}"
    result = built.run("rehearse", "tiny@1", "--toolchain", new_text, "--python", sys.executable, "--apply", "--json")
    units, (plan,) = result.json["units"], result.json["plan"]
    assert result.code == 1 and {unit["unit"] for unit in units} >= {"sm_89 fp32 tensorrt-rtx"}, result.err
    assert all(unit["verdict"] == "unknown" and unit["why"].startswith("built, not run here: no") for unit in units)
    assert (plan["verdict"], plan["commands"], result.json["applied"]) == ("unknown", [], [])
