import copy
import re
from typing import Any

import pytest

from charts import renders
from tests.charts.kube import MANIFESTS, Object, label, sample_objects

DOCS = (MANIFESTS.parent / "docs/guides/kubernetes.md", renders.CHART / "README.md", renders.CHART / "UPGRADING.md")
HOOKS = {"install": "post-install", "upgrade": "post-upgrade", "rollback": "post-rollback", "test": "test"}


def commands() -> list[tuple[str, str]]:
    """('upgrade', the whole command) of each of Helm's commands that waits, in the documentation and the notes."""
    texts = [path.read_text() for path in DOCS] + [renders.rendered(renders.sample("aws"))["NOTES.txt"]]
    pattern = rf"helm ({'|'.join(HOOKS)}) enginesmith[^`\n]*"
    return [(result[1], result[0]) for text in texts for result in re.finditer(pattern, text)]


def hooks(sample: str) -> list[tuple[Object, str]]:
    """A sample's hooks, with the events at which they run."""
    pairs = ((item, item["metadata"].get("annotations", {}).get("helm.sh/hook", "")) for item in sample_objects(sample))
    return [(item, events) for item, events in pairs if events]


def test_documented_commands_wait_long_enough() -> None:
    actual = commands()
    assert {verb for verb, _ in actual} == set(HOOKS)
    for verb, command in actual:
        search_result = re.search(r"--timeout (\d+)m", command)
        assert search_result, f"{command}: Helm's own 5 minutes"
        for item, events in hooks("aws"):
            if HOOKS[verb] in events or (verb == "upgrade" and "pre-upgrade" in events):
                assert int(search_result[1]) * 60 > item["spec"]["activeDeadlineSeconds"], (command, label(item))


@pytest.mark.parametrize("sample", renders.SAMPLES)
def test_finished_hooks_and_jobs_are_deleted(sample: str) -> None:
    for item, _ in hooks(sample):
        policies = item["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        assert {"before-hook-creation", "hook-succeeded"} <= set(policies), label(item)
        assert item["kind"] == "Pod" or item["spec"]["ttlSecondsAfterFinished"] <= 86400, label(item)


def job_of(values: dict[str, Any], component: str, revision: int = 1) -> Object:
    objects = renders.objects(renders.rendered(values, revision=revision))
    jobs = [item for item in objects if item["kind"] == "Job"]
    (job,) = [item for item in jobs if item["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    return job


@pytest.mark.parametrize("component", ["deploy", "ray-apply"])
def test_an_ordinary_job_is_named_by_its_purpose(component: str) -> None:
    """Argo CD renders each time as the first revision, and a Job cannot be changed."""
    values = renders.sample("onprem")
    first_job = job_of(values, component)
    assert re.fullmatch(rf"enginesmith-{component}-[0-9a-f]{{10}}", first_job["metadata"]["name"])
    assert job_of(values, component, revision=7) == first_job
    assert "ttlSecondsAfterFinished" not in first_job["spec"], "Argo CD would make it again"
    image, command = copy.deepcopy(values), copy.deepcopy(values)
    image["images"]["control"]["digest"] = f"sha256:{'1' * 64}"
    command["gpuGroups"][0]["max"] = 1
    assert len({job_of(changed, component)["metadata"]["name"] for changed in (values, image, command)}) == 3
