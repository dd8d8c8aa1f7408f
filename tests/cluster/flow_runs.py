"""Flow runs' Jobs as the Prefect worker makes them: the pool's template, filled in with a deployment's variables."""

import json
from itertools import pairwise

from tests.charts.kube import flow_run_job
from tests.cluster.api import Object
from tests.cluster.conftest import Cluster

# What prefect-kubernetes 0.8 adds (worker.py: prepare_for_flow_run).
LABELS = {"prefect.io/flow-run-id": "5a1b0c0e-0000-4000-8000-000000000000", "prefect.io/flow-name": "compile-model"}
COMMAND = ["prefect", "flow-run", "execute"]


def deployments(cluster: Cluster, namespace: str) -> dict[str, Object]:
    """The job variables of each deployment, by its flow and name ('validate-pending/l4'), as they are registered."""
    config = cluster.api.get("configmaps", namespace, "enginesmith-deploy")
    entries = {}
    for words in json.loads(config["data"]["commands.json"]):
        inputs = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "--job-variable")
        variables = {name: json.loads(text) for name, text in inputs.items()}
        flows = [word.removeprefix("--only=") for word in words if word.startswith("--only=")]
        entries.update({f"{flow}/{words[words.index('--name') + 1]}": variables for flow in flows})
    return entries


def job(variables: Object, name: str = "flow-run") -> Object:
    job_manifest = flow_run_job({**variables, "name": name})
    pod = job_manifest["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    container["args"] = COMMAND
    job_manifest["metadata"]["labels"] |= LABELS
    pod["metadata"]["labels"] |= LABELS
    return job_manifest


def start(cluster: Cluster, namespace: str, deployment: str) -> str:
    """Make the Job of a flow run with the Prefect worker's own rights; its name."""
    body = job(deployments(cluster, namespace)[deployment], deployment.replace("/", "-"))
    worker = cluster.account(namespace, "enginesmith-prefect-worker")
    return str(worker.create("jobs", namespace, body)["metadata"]["name"])
