import json
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from charts import renders
from enginesmith.cli import SECTIONS, enginesmith
from pipeline.compile.steps.engines import gpu_labels
from pipeline.orchestration.gpu_workers import gpu_named
from tests.charts import kube
from tests.charts.restricted import violations

# A flow run that is moved is one that failed.
NOT_TO_BE_MOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"}


def problems(words: list[str]) -> list[str]:
    """What of a command line ('enginesmith', ...) does not exist."""
    command: click.Command = enginesmith
    rest = words[1:]
    while isinstance(command, click.Group) and rest:
        name, *rest = rest
        actual = command.get_command(click.Context(command), name)
        if actual is None:
            return [f"no command {name}"]
        command = actual
    option_names = {
        option
        for parameter in command.get_params(click.Context(command))
        for option in [*parameter.opts, *parameter.secondary_opts]
    }
    flags = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [f"{command.name} has no {flag}" for flag in flags if flag not in option_names | {"--help"}]


def in_script(script: str) -> Iterator[list[str]]:
    """Command lines of Enginesmith in a shell script."""
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[:1] == ["enginesmith"]:
            yield words


def in_container(container: dict[str, list[str]], image: str) -> Iterator[list[str]]:
    command, arguments = container.get("command", []), container.get("args", [])
    if command[:2] == ["sh", "-euc"]:
        yield from in_script(command[2])
    elif command[:1] == ["enginesmith"]:
        yield [*command, *arguments]
    elif not command and "/enginesmith/client@" in image:
        yield ["enginesmith", *arguments]


def in_objects() -> Iterator[tuple[str, list[str]]]:
    for name, item in kube.everything():
        for spec in kube.pod_specs(item):
            for container in kube.containers(spec):
                yield from ((name, words) for words in in_container(container, container["image"]))
        if item["kind"] == "RayJob":
            yield from ((name, words) for words in in_script(item["spec"]["entrypoint"]))


def in_notes() -> Iterator[tuple[str, list[str]]]:
    for name in renders.SAMPLES:
        notes = renders.rendered(renders.sample(name))["NOTES.txt"]
        lines = [line for line in notes.splitlines() if "enginesmith prefect register" in line and "#" not in line]
        yield from ((f"{name} notes", words) for words in in_script("\n".join(lines)))


def test_every_command_that_pods_run_exists() -> None:
    actual = list(in_objects())
    assert not {f"{name}: {reason}" for name, words in actual for reason in problems(words)}
    assert {words[1] for _, words in actual} >= {"build", "canary", "pull", "registry", "validate"}


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_deployments_are_registered_with_options_that_exist(sample: str) -> None:
    commands = kube.deploy_commands(sample)
    assert not [reason for words in commands for reason in problems(words)]
    assert all("--only=compile-model" in words for words in commands[:1])


def test_every_command_in_the_notes_exists() -> None:
    actual = list(in_notes())
    assert not {f"{name}: {reason}" for name, words in actual for reason in problems(words)}
    assert {tuple(words[1:3]) for _, words in actual} >= {("prefect", "register")}


def test_unknown_commands_are_reported() -> None:
    assert problems(["enginesmith", "bild"]) == ["no command bild"]
    assert problems(["enginesmith", "build", "x", "--quick"]) == ["build has no --quick"]
    assert problems(["enginesmith", "canary", "judge", "--auto=1"]) == []
    assert "build" in SECTIONS["Every day"]


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_the_pod_of_a_flow_run_is_restricted_and_reaches_its_services(sample: str) -> None:
    """The pool's base job template with the chart's variables, as the Prefect worker fills it in."""
    (policy,) = [item for item in kube.sample_objects(sample) if item["metadata"]["name"] == "enginesmith-default-deny"]
    for words in kube.deploy_commands(sample):
        job = kube.flow_run_job(kube.job_variables(words))
        pod = job["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        assert not violations(pod["spec"])
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
        assert pod["metadata"]["annotations"].keys() == NOT_TO_BE_MOVED
        assert "@sha256:" in container["image"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "flow-run"
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_each_gpu_group_has_a_flow_that_proves_on_its_workers_without_a_gpu_of_its_own() -> None:
    first, *proofs, fleet = kube.deploy_commands("aws")
    assert "--only=reconcile-fleet" in fleet
    assert [option(words, "--name") for words in proofs] == ["t4", "a10g", "l4", "h100"]
    assert all("--only=validate-pending" in words for words in [first, *proofs]), "CPU engines are proven by the first"
    assert "--on" not in [*first, *fleet]
    for words in proofs:
        assert (option(words, "--on"), option(words, "--executor")) == (option(words, "--name"), "ray")
        assert option(words, "--ray-address").startswith("ray://enginesmith-ray-head-svc")
        variables = kube.job_variables(words)
        pod = kube.flow_run_job(variables)["spec"]["template"]["spec"]
        assert "nvidia.com/gpu" not in str(pod) and "karpenter" not in str(pod)
        assert "/control@sha256:" in variables["image"]
        expected = {"name": "ray-token", "mountPath": "/etc/enginesmith/ray", "readOnly": True}
        assert expected in variables["volume_mounts"]
        assert (variables["cpu_request"], variables["memory_limit"]) == ("100m", "2Gi"), "it waits for a worker"


def test_a_groups_flows_request_the_labels_of_its_workers() -> None:
    """What `--on` means to the flows (`gpu_labels`) are the labels of the RayCluster's group, for each sample."""
    for sample in ("aws", "gke", "onprem"):
        (cluster,) = [item for item in kube.sample_objects(sample) if item["kind"] == "RayCluster"]
        labels = {item["groupName"]: item.get("labels") for item in cluster["spec"]["workerGroupSpecs"]}
        on_options = {
            option(words, "--name"): option(words, "--on") for words in kube.deploy_commands(sample) if "--on" in words
        }
        assert on_options and {name: gpu_labels(gpu_named(gpu)) for name, gpu in on_options.items()} == {
            name: labels[name] for name in on_options
        }


def test_each_gpu_group_gets_canaries_if_enabled() -> None:
    first_command, *groups, _ = kube.deploy_commands("aws")
    assert "--only=canary" in first_command and "--only=settle-canary" in first_command, (
        "of CPU engines, and the one that moves channels"
    )
    assert all("--only=canary" in words and "--only=settle-canary" not in words for words in groups)
    chosen = [words for words in kube.deploy_commands("aws") if "--only=choose-buckets" in words]
    assert chosen == [first_command], "once for the cluster, where the values ask for it"
    assert not any("--only=choose-buckets" in words for words in kube.deploy_commands("onprem"))
    assert all(words[words.index("--traffic") + 1].startswith("s3://") for words in groups)
    assert not any("--only=canary" in words for words in kube.deploy_commands("onprem"))


def test_groups_with_one_gpu_share_its_flows() -> None:
    """On demand and spot: each would run the same canary, and a FAIL of either stands."""
    values = renders.sample("aws")
    l4 = next(group for group in values["gpuGroups"] if group["name"] == "l4")
    values["gpuGroups"] = [{**l4, "canary": False}, {**l4, "name": "spot"}, {**l4, "name": "more"}]
    texts = renders.objects(renders.rendered(values))
    lists = json.loads(next(item["data"]["commands.json"] for item in texts if "commands.json" in item.get("data", {})))
    flows = {
        option(words, "--name"): [w for w in words if w.startswith("--only")] for words in lists if "--on" in words
    }
    assert flows == {"l4": ["--only=validate-pending"], "spot": ["--only=canary"]}


def test_the_example_of_a_job_names_a_generation_by_its_labels() -> None:
    (job,) = kube.objects_in(next(path for path in kube.EXAMPLES if path.name == "prove-job.yaml"))
    (spec,) = kube.pod_specs(job)
    assert spec["nodeSelector"] == {"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0"}


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_deployments_that_a_release_no_longer_registers_are_deleted(sample: str) -> None:
    first_command, *other_commands = commands = kube.deploy_commands(sample)
    registered_texts = {
        f"{word.removeprefix('--only=')}/{command[command.index('--name') + 1]}"
        for command in commands
        for word in command
        if word.startswith("--only=")
    }
    assert {word.removeprefix("--keep=") for word in first_command if word.startswith("--keep=")} == registered_texts
    assert not [word for command in other_commands for word in command if word.startswith("--keep")]
    assert len({command[command.index("--owner") + 1] for command in commands}) == 1
