from pathlib import Path

from click.testing import CliRunner

from enginesmith.cli import enginesmith
from pipeline.orchestration.deployments.plan import FLOWS
from tests.pipeline.orchestration.deployments.planned import deployed


def run(*words: str) -> str:
    result = CliRunner().invoke(enginesmith, ["prefect", "deploy", *words], env={"ENGINESMITH_REGISTRY": None})
    return f"{result.output}{result.exception or ''}"


def test_deploy_reports_missing_and_wrong_values(tmp_path: Path) -> None:
    registry = str(tmp_path / "r")
    assert "give --registry or ENGINESMITH_REGISTRY" in run()
    assert "no GPU generation has that name" in run("--registry", registry, "--slots", "sm_1=2")
    assert "whole number" in run("--registry", registry, "--slots", "sm_89=many")
    assert "is not NAME=VALUE" in run("--registry", registry, "--slots", "sm_89")
    for schedule in ("hourly", "61 * * * *", "* 24 * * *", "*/0 * * * *", "0 0 * * * *", "H * * * *"):
        result = run("--registry", registry, "--fleet-schedule", schedule)
        assert f"--fleet-schedule {schedule!r}: give five fields of cron" in result, schedule
    for words, result in (
        (("--name", "a/b"), "--name 'a/b': give a name without any of"),
        (("--pool", "a%b"), "--pool 'a%b': give a name without any of"),
        (("--channel", "X Y"), "channel name 'X Y'"),
        (("--traffic", ""), "--traffic is empty"),
        (("--traffic", "http://host/t"), "is not a place"),
        (("--traffic", "s3://b/t"), "'b' is not the name of a bucket"),
        (("--executor", "ray", "--on", "l4", "--only", "compile-model"), "--on is for validate-pending and canary"),
        (("--executor", "ray", "--on", "l4", "--canary-duration", "9h"), "give 8h or less"),
    ):
        message, plan = deployed("--registry", registry, *words)
        assert result in message and plan is None
    assert "no Prefect server is configured" in run("--registry", registry)


def test_the_registry_becomes_absolute_and_is_not_opened() -> None:
    for text, uri in (("/srv/r", "file:///srv/r"), ("s3://bucket/r?region=eu-central-1",) * 2, ("file:///srv/r",) * 2):
        _, plan = deployed("--registry", text)
        assert plan and plan.deployments()[0].parameters["registry"] == uri
    for text in ("s3://AKIA:a/hunter2/b@bucket/r", "https://user:hunter2@registry.example"):
        output, plan = deployed("--registry", text)
        assert plan is None and "hunter2" not in output


def test_options_become_parameters_and_job_variables() -> None:
    words = ["--only", "compile-model", "--executor", "ray", "--ray-address", "ray://head:1", "--type", "kubernetes"]
    words += ["--job-variable", "gpu_count=1", "--job-variable", "image=x:1", "--wait-for-nodes", "15m"]
    output, plan = deployed("--registry", "r", *words)
    assert plan, output
    [entry] = plan.deployments()
    assert entry.parameters | {"registry": ""} == {
        "registry": "",
        "executor": "ray",
        "gpu_slots": True,
        "ray_address": "ray://head:1",
        "wait_for_nodes_s": 900.0,
    }
    assert entry.variables == {"gpu_count": 1, "image": "x:1"}
    assert FLOWS[0] == "compile_model"
