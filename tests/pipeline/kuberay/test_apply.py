"""Bringing a RayCluster to what is wanted: what is kept, what is refused, what goes. tests/cluster does it for real."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes.config  # noqa: F401 - it reads KUBECONFIG when it is imported, which must not count
import pytest
import yaml

from builders.errors import InputError, UnavailableError
from pipeline.kuberay.apply import CONSENT, apply, main
from pipeline.kuberay.workers import RAY_VERSION, Pod

Object = dict[str, Any]
HEAD = Pod("head", None, "2.60.0")


def group(name: str, replicas: int, most: int = 4, least: int = 0) -> Object:
    return {"groupName": name, "minReplicas": least, "maxReplicas": most, "replicas": replicas}


def ray_cluster(*groups: Object, version: str = "2.60.0", **metadata: Any) -> Object:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "enginery-ray", "namespace": "enginery", "labels": {"helm.sh/chart": "new"}, **metadata},
        "spec": {"rayVersion": version, "workerGroupSpecs": list(groups)},
    }


def worker(name: str, of: str, version: str = "2.60.0") -> Pod:
    return Pod(name, of, version)


@dataclass
class Fake:
    """A cluster in memory. races: how often somebody writes between a read and a write.

    killed: at the first deletion.
    """

    live: Object | None
    there: list[Pod] = field(default_factory=list)
    races: int = 0
    killed: bool = False
    written: list[Object] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def find(self) -> Object | None:
        return copy.deepcopy(self.live)

    def create(self, body: Object) -> None:
        self.written.append(body)

    def replace(self, body: Object) -> bool:
        self.races -= 1
        if self.races >= 0:
            assert self.live is not None
            self.live["spec"]["workerGroupSpecs"][0]["replicas"] += 1
            return False
        self.written.append(body)
        self.live = copy.deepcopy(body)
        return True

    def pods(self) -> list[Pod]:
        return [pod for pod in self.there if pod.name not in self.deleted]

    def delete(self, pod: Pod) -> None:
        if self.killed:
            raise SystemExit(137)
        self.deleted.append(pod.name)

    def owner(self, name: str) -> Object:
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": "u"}


def test_the_first_one_is_made_and_goes_with_its_config_map() -> None:
    cluster = Fake(None)
    assert apply(cluster, ray_cluster(group("l4", 0)), "enginery-ray") == "enginery-ray: created"
    (made,) = cluster.written
    assert made["metadata"]["ownerReferences"][0]["name"] == "enginery-ray"


def test_a_change_keeps_what_others_write() -> None:
    live = ray_cluster(
        {**group("l4", 3), "scaleStrategy": {"workersToDelete": ["l4-x"]}}, group("h100", 0),
        resourceVersion="7", uid="r", finalizers=["ray.io/x"], annotations={"of": "another"},
        labels={"helm.sh/chart": "old"},
    )  # fmt: skip
    live["spec"]["suspend"] = False
    cluster = Fake(live, [HEAD, worker("l4-x", "l4")])
    wanted = ray_cluster(group("l4", 0, most=8), group("h100", 1, least=1), group("b200", 0))
    assert apply(cluster, wanted, "enginery-ray") == "enginery-ray: up to date"
    (made,) = cluster.written
    groups = {item["groupName"]: item for item in made["spec"]["workerGroupSpecs"]}
    assert groups["l4"]["scaleStrategy"] == {"workersToDelete": ["l4-x"]}
    assert {name: (item["replicas"], item["maxReplicas"]) for name, item in groups.items()} == {
        "l4": (3, 8), "h100": (1, 4), "b200": (0, 4)
    }  # fmt: skip
    assert made["spec"]["suspend"] is False
    metadata = made["metadata"]
    assert (metadata["resourceVersion"], metadata["uid"], metadata["finalizers"]) == ("7", "r", ["ray.io/x"])
    assert metadata["labels"] == {"helm.sh/chart": "new"}
    assert metadata["annotations"] == {"of": "another"}
    assert not cluster.deleted


@pytest.mark.parametrize(("before", "after", "suspended"), [(1, 1, True), (0, 0, True), (0, 1, True), (1, 0, False)])
def test_who_leaves_kueue_is_not_suspended_for_ever(before: int, after: int, suspended: bool) -> None:
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    live, wanted = (ray_cluster(group("l4", 0), labels=queue if queued else {}) for queued in (before, after))
    live["spec"]["suspend"] = True
    cluster = Fake(live)
    apply(cluster, wanted, "enginery-ray")
    assert cluster.written[0]["spec"].get("suspend", False) is suspended


def test_what_the_autoscaler_writes_in_between_is_read_again() -> None:
    cluster = Fake(ray_cluster(group("l4", 1)), races=2)
    apply(cluster, ray_cluster(group("l4", 0)), "enginery-ray")
    (made,) = cluster.written
    assert made["spec"]["workerGroupSpecs"][0]["replicas"] == 3
    with pytest.raises(UnavailableError, match="changes faster"):
        apply(Fake(ray_cluster(group("l4", 1)), races=99), ray_cluster(group("l4", 0)), "enginery-ray")


GONE, LESS, NEWER = ray_cluster(group("h100", 0)), ray_cluster(group("l4", 0, most=1)), ray_cluster(
    group("l4", 0), version="2.61.0"
)  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "said", "deleted"),
    [
        (GONE, "a: its group l4 is not wanted any more", ["a", "b"]),
        (LESS, "group l4: 2 run, max is 1", []),  # whom to stop is the autoscaler's to say
        (NEWER, "a: has Ray 2.60.0, and 2.61.0 is wanted", ["head", "a", "b"]),
    ],
)
def test_workers_that_run_are_stopped_only_where_that_is_asked_for(
    wanted: Object, said: str, deleted: list[str]
) -> None:
    live, pods = ray_cluster(group("l4", 2)), [HEAD, worker("a", "l4"), worker("b", "l4")]
    refused = Fake(copy.deepcopy(live), pods)
    with pytest.raises(InputError, match=said) as caught:
        apply(refused, wanted, "enginery-ray")
    assert f"kubectl annotate raycluster enginery-ray --namespace enginery {CONSENT}=true" in str(caught.value)
    assert not refused.written + refused.deleted
    live["metadata"]["annotations"] = {CONSENT: "true", "of": "another"}
    asked = Fake(live, pods)
    apply(asked, wanted, "enginery-ray")
    assert asked.deleted == deleted
    assert asked.written[-1]["metadata"]["annotations"] == {"of": "another"}, "it is for one change"


@pytest.mark.parametrize("wanted", [GONE, NEWER])
def test_a_job_that_is_killed_half_way_is_allowed_to_go_on_by_the_next_one(wanted: Object) -> None:
    live = ray_cluster(group("l4", 2), annotations={CONSENT: "true"})
    cluster = Fake(live, [HEAD, worker("a", "l4"), worker("b", "l4")], killed=True)
    with pytest.raises(SystemExit):
        apply(cluster, wanted, "enginery-ray")
    cluster.killed = False
    assert "deleted" in apply(cluster, wanted, "enginery-ray")
    assert {"a", "b"} <= {*cluster.deleted}
    assert cluster.live is not None and CONSENT not in cluster.live["metadata"]["annotations"]


def test_consent_is_the_word_true() -> None:
    live = ray_cluster(group("l4", 1), annotations={CONSENT: "false"})
    with pytest.raises(InputError, match="not wanted any more"):
        apply(Fake(live, [worker("a", "l4")]), GONE, "enginery-ray")


def test_a_group_does_not_go_while_workers_of_it_are_about_to_be_made() -> None:
    """The operator has not yet made what the autoscaler asks for; made after the group went, nobody would end it."""
    cluster = Fake(ray_cluster(group("l4", 2)), [HEAD, worker("a", "l4")])
    with pytest.raises(InputError, match="group l4: 2 workers are asked for"):
        apply(cluster, GONE, "enginery-ray")
    live = ray_cluster(group("l4", 2), annotations={CONSENT: "true"})
    apply(Fake(live), GONE, "enginery-ray")


def test_a_pod_that_has_ended_is_no_worker_that_would_be_stopped_and_goes_with_its_group() -> None:
    """Ray's autoscaler counts each pod that is not being deleted, and fails over one of a group that is unknown."""
    cluster = Fake(ray_cluster(group("l4", 0)), [HEAD, Pod("a", "l4", "2.60.0", ended=True)])
    apply(cluster, GONE, "enginery-ray")
    assert cluster.deleted == ["a"]


def test_without_workers_another_version_takes_a_new_head_and_a_group_goes() -> None:
    for wanted, deleted in ((NEWER, ["head"]), (GONE, []), (LESS, [])):
        cluster = Fake(ray_cluster(group("l4", 0)), [HEAD])
        apply(cluster, wanted, "enginery-ray")
        assert cluster.deleted == deleted


def test_a_head_that_was_left_behind_goes_the_next_time() -> None:
    """What ended between the write and the deletion is made good: pods say what runs in them."""
    cluster = Fake(copy.deepcopy(NEWER), [HEAD, Pod("of-another-chart", None, None)])
    apply(cluster, NEWER, "enginery-ray")
    assert cluster.deleted == ["head"]


def test_one_that_is_being_deleted_is_left_alone() -> None:
    live = ray_cluster(group("l4", 0), deletionTimestamp="2026-11-22T22:00:00Z")
    with pytest.raises(UnavailableError, match="being deleted"):
        apply(Fake(live), GONE, "enginery-ray")


def test_a_pod_is_what_its_labels_say() -> None:
    labels = {"ray.io/node-type": "worker", "ray.io/group": "l4"}
    item = {"metadata": {"name": "x", "labels": labels, "annotations": {RAY_VERSION: "2.60.0"}}}
    assert Pod.from_json(item) == Pod("x", "l4", "2.60.0")
    labels["ray.io/node-type"] = "head"
    assert Pod.from_json(item).group is None
    assert Pod.from_json({**item, "status": {"phase": "Failed"}}).ended


def test_without_a_cluster_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    file, kubeconfig = tmp_path / "raycluster.yaml", tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(GONE))
    here = [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}]
    context = [{"name": "x", "context": {"cluster": "x", "user": "x"}}]
    config = {"clusters": here, "contexts": context, "users": [{"name": "x", "user": {}}], "current-context": "x"}
    kubeconfig.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert main([str(file), "--owner", "enginery-ray"]) == UnavailableError.exit_code
    assert "error: http://127.0.0.1:9 does not answer" in capsys.readouterr().err
