import re
import signal
from dataclasses import asdict

import pytest

from enginesmith.core.errors import canonical_json
from enginesmith.core.parsing import this_process
from enginesmith.core.text import precise_now
from enginesmith.registry.builds.build_history import LockHolder, hold_build_lock
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import build_lock_key
from tests.enginesmith.cli.test_interruption import interrupt, start
from tests.pipeline.projects import Project
from tests.waiting import PATIENCE_S, stopped

SMALL = {"precisions": ["fp32"], "targets": ["cpu"], "calibration": None}
WAITING = re.compile(r"lock: waiting: compiling tiny is running on \S+, process (\d+), since ")


@pytest.mark.slow
def test_three_concurrent_builds_make_everything_once(project: Project) -> None:
    project.change_spec(**SMALL, validation={"latency": {}})
    runs = [start(project) for _ in range(3)]
    messages = [run.communicate(timeout=PATIENCE_S)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], messages
    all_text = "".join(messages)
    for step in ("export: done", "onnxruntime: built in", "prove cpu fp32 onnxruntime: done"):
        assert all_text.count(step) == 1, all_text
    assert len(re.findall("latency cpu fp32 onnxruntime: done", all_text)) == 1, "and none was timed beside another"
    assert set(WAITING.findall(all_text)) <= {str(run.pid) for run in runs}
    result = project.run("registry", "gc", "--json").json
    whys = [item["why"] for item in result["items"] if item["kind"] == "blob"]
    reasons = [reason for reason in whys if not reason.startswith("only a step record (")]
    assert len(reasons) <= 1, "but the snapshot of before the latency was known"
    assert list(project.store.list("locks/")) == []
    assert project.run("registry", "fsck").code == 0


@pytest.mark.slow
def test_two_builds_of_one_model_do_not_run_in_parallel(project: Project) -> None:
    project.change_spec(precisions=["fp32", "fp16"], targets=["cpu"], calibration=None)
    first_process = start(project, "--precision", "fp32", stop_at="export ...")  # however late the second starts
    assert first_process.stderr is not None
    with first_process.stderr as lines:
        assert any("export ..." in line for line in lines)
        second_result = start(project, "--precision", "fp16")
        assert second_result.stderr is not None
        waiting = next(line for line in second_result.stderr if "waiting" in line)
        stopped(first_process)
        first_process.send_signal(signal.SIGCONT)
        rest = lines.read()
    message = second_result.communicate(timeout=PATIENCE_S)[1]
    assert (first_process.wait(PATIENCE_S), second_result.returncode) == (0, 0), rest + message
    assert WAITING.search(waiting) and f"process {first_process.pid}, since" in waiting and "export: cached" in message


def test_a_killed_holder_blocks_nobody(project: Project) -> None:
    project.change_spec(**SMALL)
    killed_run = start(project, stop_at="export ...")
    interrupt(killed_run, "export ...", signal.SIGKILL)
    assert killed_run.wait(PATIENCE_S) == -signal.SIGKILL
    assert list(project.store.list("locks/")), "it left its locks behind"
    after = project.build()
    assert after.code == 0 and after.json["version"] == "1" and "lock: waiting" not in after.err
    assert list(project.store.list("locks/")) == []


def test_a_run_without_work_waits_for_nobody(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.change_spec(**SMALL)
    names: list[str] = []
    monkeypatch.setattr(
        "pipeline.compile.run_context.hold_build_lock",
        lambda store, name, *others: names.append(name) or hold_build_lock(store, name, *others),
    )
    assert project.build().code == 0 and len(names) == 2
    store, presence = open_store(project.registry, create=True), this_process()
    stamp = precise_now()
    for name in names:
        holder = LockHolder("compiling tiny", "elsewhere", presence.namespace, 7, 1, "0", 0, stamp)
        store.replace(build_lock_key(name), canonical_json(asdict(holder)), None)
    monkeypatch.setattr("pipeline.compile.run_context.hold_build_lock", lambda *_: pytest.fail("it waits"))
    second_build = project.build()
    assert second_build.code == 0 and second_build.json["cached"] is True
    assert "lock: done: all results are in the registry" in second_build.err
