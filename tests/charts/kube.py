"""Reading Kubernetes objects in tests: their pods, containers, strings."""

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from charts import renders

Object = dict[str, Any]
MANIFESTS = renders.CHART.parents[1] / "manifests"
EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))


@cache
def sample_objects(name: str) -> tuple[Object, ...]:
    """What a sample of the chart renders to."""
    return tuple(renders.objects(renders.rendered(renders.sample(name))))


@cache
def objects_in(path: Path) -> tuple[Object, ...]:
    """Objects in a file of manifests."""
    return tuple(renders.objects_in(path.read_text()))


def everything() -> Iterator[tuple[str, Object]]:
    """Every object that the project ships, with a name for messages."""
    for name in renders.SAMPLES:
        yield from ((f"{name}: {label(item)}", item) for item in sample_objects(name))
    for path in [*EXAMPLES, *sorted((MANIFESTS / "enginesmith").glob("*.yaml"))]:
        yield from ((f"{path.name}: {label(item)}", item) for item in objects_in(path))


def label(item: Object) -> str:
    """'Deployment enginesmith-metrics'."""
    return f"{item['kind']} {item['metadata']['name']}"


def pod_specs(value: Any) -> Iterator[Object]:
    """Every pod spec in an object, however deep: what has containers."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        for inner_value in value.values():
            yield from pod_specs(inner_value)
    elif isinstance(value, list):
        for inner_value in value:
            yield from pod_specs(inner_value)


def pods(value: Any) -> list[Object]:
    """Every pod and pod template in an object: what has metadata and a spec with containers."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    own_values = [value] if isinstance(value.get("spec", {}), dict) and "containers" in value.get("spec", {}) else []
    return own_values + [pod for item in value.values() for pod in pods(item)]


def policies(objects: Iterable[Object]) -> dict[str, Object]:
    """The spec of every network policy, by its name."""
    items = [item for item in objects if item["kind"] == "NetworkPolicy"]
    return {item["metadata"]["name"].removeprefix("enginesmith-"): item["spec"] for item in items}


def containers(spec: Object) -> list[Object]:
    """Its containers, init containers first."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def deploy_commands(name: str) -> list[list[str]]:
    """The command lines that register a sample's deployments."""
    result = next(item for item in sample_objects(name) if label(item) == "ConfigMap enginesmith-deploy")
    return json.loads(result["data"]["commands.json"])


def job_variables(command: list[str]) -> Object:
    """What a command line of `enginesmith prefect deploy` sets in the pool's base job template."""
    items = [word for flag, word in pairwise(command) if flag == "--job-variable"]
    return {word.partition("=")[0]: json.loads(word.partition("=")[2]) for word in items}


def flow_run_job(variables: Object) -> Object:
    """The Job that the Prefect worker makes of the pool's base job template and a deployment's variables."""
    from prefect.utilities.templating import apply_values

    from pipeline.orchestration.deployments.deploy import template

    base = template("kubernetes")
    variable_names = base["variables"]["properties"]
    defaults = {name: item["default"] for name, item in variable_names.items() if "default" in item}
    return apply_values(base["job_configuration"]["job_manifest"], {**defaults, **variables})


def with_value(path: str, value: Any, base: str | Object = "aws") -> dict[str, Any]:
    """Values, or a sample's, with one changed; 'gpuGroups.0.max' leads into a list."""
    values = copy.deepcopy(renders.sample(base) if isinstance(base, str) else base)
    *places, last_number = [int(word) if word.isdigit() else word for word in path.split(".")]
    local_value: Any = values
    for place in places:
        local_value = local_value[place] if isinstance(local_value, list) else local_value.setdefault(place, {})
    local_value[last_number] = value
    return values


def batches(cases: Iterable[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """Cases that begin with a path of values, one of each top-level key at a time: rendering is what takes time."""
    by_key = defaultdict(list)
    for case in cases:
        by_key[case[0].split(".")[0]].append(case)
    return [list(filter(None, batch)) for batch in zip_longest(*by_key.values())]
