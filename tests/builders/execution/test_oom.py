import pytest

from builders.execution import process
from builders.execution.jobs import Job, ProcessLimits, ReducedRequest
from builders.execution.local import LocalExecutor
from builders.execution.process import oom_kills
from enginesmith.core.errors import StepError
from tests.calls import Call, call_job

JOBS = "tests.builders.jobs"


def test_the_cgroups_own_count_has_priority(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (cgroups / "pod" / "job").mkdir(parents=True)
    assert oom_kills(proc, cgroups) == 0
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 7\n")
    assert oom_kills(proc, cgroups) == 7
    (proc / "self" / "cgroup").write_text("0::/pod/job\n")
    (cgroups / "pod" / "job" / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(proc, cgroups) == 3


def test_a_kill_counts_as_memory_only_with_the_kernels_evidence(tmp_path, monkeypatch):
    killed_job = call_job("unit", f"{JOBS}:signal_self", {"number": 9})
    counts = iter([3, 4, 3, 3])
    monkeypatch.setattr(process, "oom_kills", lambda: next(counts))
    for kind, words in (("node-memory", "by the kernel, which ran out of memory; it held"), ("crash", "SIGKILL")):
        with pytest.raises(StepError, match=words) as error:
            process.run_job(killed_job, tmp_path)
        assert error.value.kind == kind


def test_a_job_over_its_limit_is_retried_once_if_reducible():
    def job(mib: int) -> Job:
        reduced_request = ReducedRequest(Call(f"{JOBS}:hold", {"mib": mib, "limit_mib": 200}), f"with mib {mib}")
        first_fields = {"mib": 400, "limit_mib": 200}
        return call_job("unit", f"{JOBS}:hold", first_fields, limits=ProcessLimits(60, 200), reduced=reduced_request)

    assert LocalExecutor(1).run(job(20)) == 20
    with pytest.raises(StepError, match=r"its limit is 200 MiB.*after 2 tries") as error:
        LocalExecutor(1).run(job(300))
    assert error.value.kind == "memory" and error.value.peak_mib > 200
