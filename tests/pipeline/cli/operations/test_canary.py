"""`enginesmith canary run` on a real engine; interrupted, it leaves observations to be judged."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.hardware.cpu_kinds import this_kind
from tests.pipeline.projects import Project, exit_code
from tests.waiting import PATIENCE_S, until
from validation.canary.observations import read_observations
from validation.canary.report import read_report

COMMAND = [sys.executable, "-m", "enginesmith"]


def record(project: Project, requests: int, per_second: float) -> Path:
    path = project.folder / "traffic.jsonl"
    np.savez(project.folder / "samples.npz", x=np.load(project.folder / "golden.npz")["x"])
    words = ("traffic", "record", path, "--samples", project.folder / "samples.npz")
    assert exit_code(*words, "--per-second", per_second, "--requests", requests) == 0
    return path


def run(project: Project, path: Path, out: Path, *words: str):
    references = ["--candidate", "tiny@1", "--baseline", "tiny@1", "--target", "cpu"]
    return project.run("canary", "run", *references, "--traffic", path, "--out", out, "--json", *words)


@pytest.mark.slow
def test_a_run_goes_from_traffic_to_page(built, tmp_path):
    path = record(built, 300, 2000)
    out_path = tmp_path / "canary"
    message = run(built, path, out_path, "--looks", "2", "--scale", "2").json
    assert message["paired"] and message["traffic"]["recorded"] == 300 and "made up" in message["notes"][0]
    assert message["candidate"]["engine"] == message["baseline"]["engine"]
    assert message["candidate"]["precision"] == message["baseline"]["precision"]
    assert message["verdict"] != "FAIL" and message["looks"]["requests"] == [150, 300]
    tables = [read_observations(out_path / f"{side}.jsonl") for side in ("candidate", "baseline")]
    assert [len(table) for table in tables] == [300, 300] and all(tables[0].ok) and tables[0].output == tables[1].output
    report = read_report((out_path / "report.json").read_bytes())
    assert report.verdict == message["verdict"] and (out_path / "report.html").exists()
    second_result = run(built, path, out_path)
    assert second_result.code == 2 and "has the observations of a canary already" in second_result.err
    (tmp_path / "other.jsonl").write_text(path.read_text().replace('"x":', '"y":'))
    assert run(built, tmp_path / "other.jsonl", tmp_path / "other").code == 2
    absent_result = built.run(
        "canary", "run", "--candidate", "tiny@1", "--baseline", "tiny@1", "--target", "sm_89", "--traffic", path
    )
    assert absent_result.code == 2 and "run this on a node that has it" in absent_result.err


def test_an_in_flight_run_stores_its_verdict(built, tmp_path):
    path, out_path = record(built, 200, 2000), tmp_path / "canary"
    result = run(built, path, out_path, "--in-flight", "4", "--looks", "1", "--attach")
    assert result.json["traffic"]["in_flight"] == 4 and result.json["target"] == this_kind().name
    assert "requests in flight: 4; as was asked for" in result.json["notes"] and "the verdict on" in result.err
    assert "in flight" not in result.err, "it is a note, which without --json is printed once"
    tables = [read_observations(out_path / f"{side}.jsonl") for side in ("candidate", "baseline")]
    assert tables[0].request == list(range(200)) and all(tables[0].ok) and all(tables[1].ok)
    assert tables[0].output == tables[1].output, "threads that share a session give each request its own answer"
    (verdicts,) = built.run("show", "tiny@1", "--json").json["canaries"]
    assert (verdicts["target"], verdicts["verdict"]) == (this_kind().name, result.json["verdict"])


@pytest.mark.slow
def test_an_interrupted_run_stores_its_observations(built, tmp_path):
    path, out_path = record(built, 3000, 100), tmp_path / "canary"
    words = ["canary", "run", "--candidate", "tiny@1", "--baseline", "tiny@1", "--target", "cpu"]
    words += ["--traffic", str(path), "--out", str(out_path), "--looks", "20", "--registry", str(built.registry)]
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until((out_path / "report.json").exists)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engines' processes get it too
        _, output = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "Traceback" not in output
    assert process.returncode == 130 and f"--previous {out_path}/report.json" in output
    files = ["--candidate", str(out_path / "candidate.jsonl"), "--baseline", str(out_path / "baseline.jsonl")]
    tables = [read_observations(out_path / f"{side}.jsonl") for side in ("candidate", "baseline")]
    assert 150 <= len(tables[1]) < 3000 and tables[0].request == tables[1].request and not tables[0].cut
    assert all(table.ended for table in tables), "both say that they were stopped in order"
    judged_result = built.run("canary", "judge", *files, "--json", "--out", tmp_path / "judged")
    assert judged_result.code == 1 and judged_result.json["looks"]["planned"] == 3000, "what was planned is remembered"
    assert judged_result.json["looks"]["fractions"][0] < 0.5
    for path in (out_path / "candidate.jsonl", out_path / "baseline.jsonl"):  # as kill -9 leaves them
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    judged_result = built.run("canary", "judge", *files, "--json", "--out", tmp_path / "judged")
    assert any("the run was killed after" in item["note"] for item in judged_result.json["criteria"])
