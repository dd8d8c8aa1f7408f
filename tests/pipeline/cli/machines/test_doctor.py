"""`enginesmith doctor`: findings, as a table and as JSON."""

import os
import subprocess
import sys

from tests.pipeline.projects import Project


def test_findings_in_json_name_the_remedy(project: Project) -> None:
    findings = {item["subject"]: item for item in project.run("doctor", "--json").json["findings"]}
    assert findings["onnxruntime"]["state"] == "ok" and findings["tensorrt"]["state"] == "missing"
    assert "pip install" in findings["tensorrt"]["detail"]


def test_doctor_answers_although_tmpdir_names_no_folder(project: Project) -> None:
    command = [sys.executable, "-m", "enginesmith", "doctor", "--registry", str(project.registry)]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": "/nowhere"}, capture_output=True, text=True)
    assert "temporary space" in done.stdout and "Traceback" not in done.stderr
