"""Bringing a RayCluster to what is wanted: what is kept, what is refused, what goes. tests/cluster does it for real."""

import copy
import json
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes.client
import kubernetes.config
import pytest
import yaml
from kubernetes.client.exceptions import ApiException

from enginesmith.core.errors import InputError, UnavailableError
from pipeline.fleet.inventory import Access
from pipeline.orchestration.kuberay.apply import Kubernetes, RayHead, finish, main
from pipeline.orchestration.kuberay.apply import apply as apply_waiting
from pipeline.orchestration.kuberay.changes import CONSENT, IMAGE, RAY_VERSION, SUSPENDED, Load, Pod, outdated_pods
from tests.pipeline.projects import raising

Object = dict[str, Any]
REDIS = "ray.io/gcs-ft-redis-cleanup-finalizer"
HEAD = Pod("head", None, "2.60.0")
WORDS = ("--owner", "enginesmith-ray", "--head", "127.0.0.1:9")


def group(name: str, replicas: int, most: int = 4, least: int = 0) -> Object:
    return {"groupName": name, "minReplicas": least, "maxReplicas": most, "replicas": replicas}


def ray_cluster(*groups: Object, version: str = "2.60.0", **metadata: Any) -> Object:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": "enginesmith-ray",
            "namespace": "enginesmith",
            "labels": {"helm.sh/chart": "new"},
            **metadata,
        },
        "spec": {"rayVersion": version, "workerGroupSpecs": list(groups), "headGroupSpec": {"template": "the head's"}},
    }


def worker(name: str, of: str, version: str = "2.60.0") -> Pod:
    return Pod(name, of, version)


@dataclass
class Fake:
    """A cluster in memory, with a KubeRay that ends pods as they are named in the spec, at once or never (`idle`).

    races: how often somebody writes between a read and a write.
    """

    live: Object | None
    there: list[Pod] = field(default_factory=list)
    races: int = 0
    idle: bool = False
    written: list[Object] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

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
        if not self.idle:
            self.reconcile(body["spec"])
        return True

    def reconcile(self, spec: Object) -> None:
        """KubeRay 1.7 ends all pods of what is suspended, and workers that a group of the spec names as its own."""
        groupnames = {
            (group["groupName"], name)
            for group in spec["workerGroupSpecs"]
            for name in group.get("scaleStrategy", {}).get("workersToDelete", ())
        }
        self.ended += [pod.name for pod in self.pods() if spec.get("suspend") or (pod.group, pod.name) in groupnames]

    def pods(self) -> list[Pod]:
        return [pod for pod in self.there if pod.name not in self.ended]

    def owner(self, name: str) -> Object:
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": "u"}


@dataclass
class FakeHead:
    """A head with this load, None for one that does not answer."""

    now: Load | None = field(default_factory=Load)
    drained: list[str] = field(default_factory=list)

    def load(self) -> Load | None:
        return self.now

    def drain(self, nodes: list[str]) -> None:
        self.drained += nodes


def apply(cluster: Fake, manifest: Object, owner: str, head: FakeHead | None = None) -> str:
    return apply_waiting(cluster, manifest, owner, head or FakeHead(), lambda _: None)


def test_the_first_cluster_is_created_and_deleted_with_its_config_map() -> None:
    cluster = Fake(None)
    assert apply(cluster, ray_cluster(group("l4", 0)), "enginesmith-ray") == "enginesmith-ray: created"
    (writes,) = cluster.written
    assert writes["metadata"]["ownerReferences"][0]["name"] == "enginesmith-ray"


def test_kuberays_finalizer_stays_while_there_is_a_redis() -> None:
    cluster, expected = Fake(ray_cluster(group("l4", 0), finalizers=[REDIS])), ray_cluster(group("l4", 0))
    expected["spec"]["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    apply(cluster, expected, "enginesmith-ray")
    assert cluster.written[0]["metadata"]["finalizers"] == [REDIS]


def test_a_change_keeps_fields_of_other_writers() -> None:
    live_cluster = ray_cluster(
        {**group("l4", 3), "scaleStrategy": {"workersToDelete": ["l4-x"]}}, group("h100", 0),
        resourceVersion="7", uid="r", finalizers=["ray.io/x", REDIS], annotations={"of": "another"},
        labels={"helm.sh/chart": "old"},
    )  # fmt: skip
    live_cluster["spec"]["suspend"] = False
    cluster = Fake(live_cluster, [HEAD, worker("l4-x", "l4")])
    expected = ray_cluster(group("l4", 0, most=8), group("h100", 1, least=1), group("b200", 0))
    assert apply(cluster, expected, "enginesmith-ray") == "enginesmith-ray: up to date"
    (writes,) = cluster.written
    groups = {item["groupName"]: item for item in writes["spec"]["workerGroupSpecs"]}
    assert groups["l4"]["scaleStrategy"] == {"workersToDelete": ["l4-x"]}
    assert {name: (item["replicas"], item["maxReplicas"]) for name, item in groups.items()} == {
        "l4": (3, 8), "h100": (1, 4), "b200": (0, 4)
    }  # fmt: skip
    assert writes["spec"]["suspend"] is False
    metadata = writes["metadata"]
    assert (metadata["resourceVersion"], metadata["uid"], metadata["finalizers"]) == ("7", "r", ["ray.io/x"])
    assert metadata["labels"] == {"helm.sh/chart": "new"} and metadata["annotations"] == {"of": "another"}
    assert cluster.ended == ["l4-x"], "which the autoscaler asked for"


@pytest.mark.parametrize(("before", "after", "suspended"), [(1, 1, True), (0, 0, True), (0, 1, True), (1, 0, False)])
def test_a_cluster_that_leaves_kueue_is_resumed(before: int, after: int, suspended: bool) -> None:
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    live_cluster, expected = (ray_cluster(group("l4", 0), labels=queue if queued else {}) for queued in (before, after))
    live_cluster["spec"]["suspend"] = True
    cluster = Fake(live_cluster)
    text = apply(cluster, expected, "enginesmith-ray")
    assert ("up to date" not in text) is suspended
    assert not suspended or ("until Kueue admits it to queue gpus" if after else '{"spec": {"suspend": false}}') in text
    assert cluster.written[0]["spec"]["suspend"] is suspended, "absent would not resume it"


def test_concurrent_changes_of_the_autoscaler_are_read_again() -> None:
    cluster = Fake(ray_cluster(group("l4", 1)), races=2)
    apply(cluster, ray_cluster(group("l4", 0)), "enginesmith-ray")
    (writes,) = cluster.written
    assert writes["spec"]["workerGroupSpecs"][0]["replicas"] == 3
    with pytest.raises(UnavailableError, match="keeps changing"):
        apply(Fake(ray_cluster(group("l4", 1)), races=999), ray_cluster(group("l4", 0)), "enginesmith-ray")


GONE, LESS, NEWER = ray_cluster(group("h100", 0)), ray_cluster(group("l4", 0, most=1)), ray_cluster(
    group("l4", 0), version="2.61.0"
)  # fmt: skip


@pytest.mark.parametrize(
    ("manifest", "message", "ended"),
    [
        (GONE, "a: its group l4 is removed", ["a", "b"]),
        (LESS, "group l4: 2 workers run, and max is 1", []),  # whom to stop is the autoscaler's to say
        (NEWER, "a: has Ray 2.60.0, not 2.61.0", ["head", "a", "b"]),
    ],
)
def test_running_workers_are_stopped_only_with_consent(manifest: Object, message: str, ended: list[str]) -> None:
    live_cluster, pods = ray_cluster(group("l4", 2)), [HEAD, worker("a", "l4"), worker("b", "l4")]
    refusing_cluster = Fake(copy.deepcopy(live_cluster), pods)
    with pytest.raises(InputError, match=message) as error:
        apply(refusing_cluster, manifest, "enginesmith-ray")
    assert f"kubectl annotate raycluster enginesmith-ray --namespace enginesmith {CONSENT}=true" in str(error.value)
    assert not refusing_cluster.written + refusing_cluster.ended
    live_cluster["metadata"]["annotations"] = {CONSENT: "true", "of": "another"}
    fake_cluster = Fake(live_cluster, pods)
    assert ", ".join(ended) in apply(fake_cluster, manifest, "enginesmith-ray")
    assert fake_cluster.ended == ended
    last_object = fake_cluster.written[-1]
    assert last_object["metadata"]["annotations"] == {"of": "another"}, "it is for one change"
    assert not last_object["spec"].get("suspend", False)
    names = [item["groupName"] for item in last_object["spec"]["workerGroupSpecs"]]
    assert names == [item["groupName"] for item in manifest["spec"]["workerGroupSpecs"]]


@pytest.mark.parametrize("manifest", [GONE, NEWER])
def test_the_next_job_continues_a_killed_one(manifest: Object) -> None:
    live_cluster = ray_cluster(group("l4", 2), annotations={CONSENT: "true"})
    cluster = Fake(live_cluster, [HEAD, worker("a", "l4"), worker("b", "l4")], idle=True)
    with pytest.raises(SystemExit):
        apply_waiting(cluster, manifest, "enginesmith-ray", FakeHead(), raising(SystemExit(137)))
    cluster.idle = False
    cluster.reconcile(cluster.written[-1]["spec"])
    assert "up to date" in apply(cluster, manifest, "enginesmith-ray")
    assert {"a", "b"} <= {*cluster.ended}
    assert cluster.live is not None and not {CONSENT, SUSPENDED} & {*cluster.live["metadata"]["annotations"]}
    assert not cluster.live["spec"].get("suspend")


def test_a_removed_group_stays_without_workers_until_its_own_have_ended() -> None:
    """Gone at once, its workers would be in no group whose `workersToDelete` could name them."""
    live_cluster = ray_cluster({**group("l4", 2), "template": "l4's"}, annotations={CONSENT: "true"})
    cluster = Fake(live_cluster, [HEAD, worker("a", "l4")])
    apply(cluster, GONE, "enginesmith-ray")
    first_object, last_object = cluster.written
    assert [item["groupName"] for item in first_object["spec"]["workerGroupSpecs"]] == ["h100", "l4"]
    assert first_object["spec"]["workerGroupSpecs"][1] == {
        **group("l4", 0, most=0), "template": "l4's", "scaleStrategy": {"workersToDelete": ["a"]}
    }  # fmt: skip
    assert [item["groupName"] for item in last_object["spec"]["workerGroupSpecs"]] == ["h100"]


def test_a_new_group_with_the_same_name_ends_old_workers() -> None:
    cluster = Fake(ray_cluster(group("h100", 0)), [HEAD, Pod("a", "gone", "2.60.0", ended=True)])
    assert apply(cluster, GONE, "enginesmith-ray") == "enginesmith-ray: up to date; ended a"
    stand_in = cluster.written[0]["spec"]["workerGroupSpecs"][-1]
    assert (stand_in["groupName"], stand_in["maxReplicas"], stand_in["template"]) == ("gone", 0, "the head's")


def test_only_a_worker_of_another_version_beside_a_new_head_is_ended() -> None:
    live_cluster = ray_cluster(group("l4", 2), version="2.61.0", annotations={CONSENT: "true"})
    cluster = Fake(live_cluster, [Pod("head", None, "2.61.0"), worker("a", "l4"), worker("b", "l4", "2.61.0")])
    apply(cluster, NEWER, "enginesmith-ray")
    assert cluster.ended == ["a"] and cluster.written[-1]["spec"]["workerGroupSpecs"][0]["replicas"] == 2


def test_under_kueue_only_kueue_resumes() -> None:
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    manifest = ray_cluster(group("l4", 0), version="2.61.0", labels=queue)
    cluster = Fake(ray_cluster(group("l4", 0), labels=queue), [HEAD])
    assert "until Kueue admits it to queue gpus; ended head" in apply(cluster, manifest, "enginesmith-ray")
    assert cluster.written[-1]["spec"]["suspend"] is True


def test_a_kuberay_that_ends_no_worker_is_named() -> None:
    cluster = Fake(ray_cluster(group("l4", 0)), [HEAD], idle=True)
    with pytest.raises(UnavailableError, match="KubeRay does not end head; check that its operator runs"):
        apply(cluster, NEWER, "enginesmith-ray")


def test_consent_is_the_word_true() -> None:
    live_cluster = ray_cluster(group("l4", 1), annotations={CONSENT: "false"})
    with pytest.raises(InputError, match=r"its group .* is removed"):
        apply(Fake(live_cluster, [worker("a", "l4")]), GONE, "enginesmith-ray")


def test_a_group_stays_while_its_workers_are_being_created() -> None:
    """The operator has not yet made what the autoscaler asks for; made after the group went, nobody would end it."""
    cluster = Fake(ray_cluster(group("l4", 2)), [HEAD, worker("a", "l4")])
    with pytest.raises(InputError, match="group l4: it is removed; 2 workers were requested"):
        apply(cluster, GONE, "enginesmith-ray")
    apply(Fake(ray_cluster(group("l4", 2), annotations={CONSENT: "true"})), GONE, "enginesmith-ray")


def test_an_ended_pod_is_no_worker_and_is_deleted_with_its_group() -> None:
    """Ray's autoscaler counts each pod that is not being deleted, and fails over one of a group that is unknown."""
    cluster = Fake(ray_cluster(group("l4", 0)), [HEAD, Pod("a", "l4", "2.60.0", ended=True)])
    apply(cluster, GONE, "enginesmith-ray")
    assert cluster.ended == ["a"]


def test_without_workers_another_version_gets_a_new_head_and_a_group_is_deleted() -> None:
    for expected, ended_names in ((NEWER, ["head"]), (GONE, []), (LESS, [])):
        cluster = Fake(ray_cluster(group("l4", 0)), [HEAD])
        apply(cluster, expected, "enginesmith-ray")
        assert cluster.ended == ended_names


def test_a_leftover_head_is_deleted_the_next_time() -> None:
    """What ended between the write and the suspension is made good: pods say what runs in them."""
    cluster = Fake(copy.deepcopy(NEWER), [HEAD])
    apply(cluster, NEWER, "enginesmith-ray")
    assert cluster.ended == ["head"]
    unknown_cluster = Fake(copy.deepcopy(NEWER), [HEAD, Pod("a", "l4", None)])
    with pytest.raises(InputError, match=r"a: ends with head, which has Ray 2\.60\.0, not 2\.61\.0"):
        apply(unknown_cluster, NEWER, "enginesmith-ray")


def test_a_cluster_under_deletion_is_not_changed() -> None:
    live_cluster = ray_cluster(group("l4", 0), deletionTimestamp="2026-11-22T22:00:00Z")
    with pytest.raises(UnavailableError, match="being deleted"):
        apply(Fake(live_cluster), GONE, "enginesmith-ray")


def test_an_image_that_a_webhook_names_otherwise_is_not_another_one() -> None:
    """Its pods would be ended at each upgrade, and every five minutes."""
    for annotations, is_same in (({IMAGE: "a/x:1"}, True), ({IMAGE: "b/x:1"}, False), ({}, False)):
        containers = [{"name": "proxy", "image": "proxy"}, {"name": "ray-head", "image": "a/x@sha256:1"}]
        metadata = {"name": "head", "annotations": annotations}
        pod = Pod.from_json({"metadata": metadata, "spec": {"containers": containers}})
        assert outdated_pods([pod], with_image("a/x:1")) == ([] if is_same else [pod]), annotations


def with_image(image: str) -> Object:
    template = {"metadata": {"annotations": {IMAGE: image}}}
    cluster_spec = ray_cluster({**group("l4", 2, least=1), "template": template})
    return {**cluster_spec, "spec": {**cluster_spec["spec"], "headGroupSpec": {"template": template}}}


def old_pods() -> list[Pod]:
    return [Pod(name, of, "2.60.0", image="old") for name, of in (("head", None), ("a", "l4"), ("b", "l4"))]


@pytest.mark.parametrize(
    ("load", "ended", "drained", "message"),
    [
        (Load(), ["head", "a", "b"], [], "up to date; ended head, a, b"),
        (
            Load({"a": "node-a"}),
            ["b"],
            ["node-a"],
            "ended b; pods with another image stay.*: head, a; workers end after",
        ),
        (Load(queued=True), ["a", "b"], [], "because builds run or wait: head;.* the head stays until nothing builds"),
        (
            None,
            [],
            [],
            "up to date; pods with another image stay, because Ray's head does not say what they do: head, a, b",
        ),
    ],
)
def test_a_new_image_ends_idle_workers_and_the_rest_after_their_unit(load, ended, drained, message):
    """With the compilers of another image, an old worker would refuse each build, for ever where `min` is 1."""
    cluster, head = Fake(with_image("old"), old_pods()), FakeHead(load)
    assert re.search(message, apply(cluster, with_image("new"), "enginesmith-ray", head))
    assert (cluster.ended, head.drained) == (ended, drained)
    spec = cluster.written[-1]["spec"]
    assert not spec.get("suspend") and spec["workerGroupSpecs"][0]["replicas"] == 2
    same_cluster = Fake(with_image("old"), old_pods())
    assert apply(same_cluster, with_image("old"), "enginesmith-ray", head).endswith(": up to date")


def test_leftover_workers_end_when_idle_without_other_writes() -> None:
    image, head = with_image("new"), FakeHead(Load({"a": "node-a"}))
    cluster = Fake(with_image("old"), old_pods())
    assert "does not have the images" in finish(cluster, image, "enginesmith-ray", head) and not cluster.written
    apply(cluster, image, "enginesmith-ray", head)
    assert cluster.ended == ["b"]
    assert "pods with another image stay" in finish(cluster, image, "enginesmith-ray", head) and cluster.ended == ["b"]
    head.now = Load()
    assert "ended head, a" in finish(cluster, image, "enginesmith-ray", head)
    writes = len(cluster.written)
    assert "no pod has another image" in finish(cluster, image, "enginesmith-ray", head)
    assert len(cluster.written) == writes


def test_without_a_head_nothing_builds_and_a_silent_one_is_unknown(monkeypatch: Any) -> None:
    assert RayHead("127.0.0.1:9").load() == RayHead("no.such.host.invalid:9").load() == Load()
    monkeypatch.setattr(socket, "create_connection", raising(TimeoutError()))
    assert RayHead("127.0.0.1:9").load() is None


def test_a_pod_is_classified_by_its_labels() -> None:
    labels = {"ray.io/node-type": "worker", "ray.io/group": "l4"}
    item = {"metadata": {"name": "x", "labels": labels, "annotations": {RAY_VERSION: "2.60.0"}}}
    assert Pod.from_json(item) == Pod("x", "l4", "2.60.0")
    labels["ray.io/node-type"] = "head"
    assert Pod.from_json(item).group is None and Pod.from_json({**item, "status": {"phase": "Failed"}}).ended


def test_a_missing_cluster_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    file, kubeconfig = tmp_path / "raycluster.yaml", tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(GONE))
    fields = [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}]
    context = [{"name": "x", "context": {"cluster": "x", "user": "x"}}]
    config = {"clusters": fields, "contexts": context, "users": [{"name": "x", "user": {}}], "current-context": "x"}
    kubeconfig.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert main([str(file), *WORDS]) == UnavailableError.exit_code
    assert "error: http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "metadata: {name: x}", "metadata: {name: 1, namespace: y}"])
def test_an_invalid_ray_cluster_file_is_refused_by_the_field(text, tmp_path, capsys):
    (tmp_path / "raycluster.yaml").write_text(text)
    assert main([str(tmp_path / "raycluster.yaml"), *WORDS]) == InputError.exit_code
    assert "error: metadata.name" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "printed"), [((), "ended head, a, b"), (("--finish",), "does not have the images")])
def test_the_program_prints_its_actions_and_exits_with_0(words, printed, tmp_path, capsys, monkeypatch):
    (file := tmp_path / "raycluster.yaml").write_text(yaml.safe_dump(with_image("new")))
    fakes = {"Access": object, "Kubernetes": lambda *_: Fake(with_image("old"), old_pods()), "RayHead": FakeHead}
    for name, fake_cluster in fakes.items():
        monkeypatch.setattr(f"pipeline.orchestration.kuberay.apply.{name}", fake_cluster)
    monkeypatch.setattr(FakeHead, "load", lambda _: Load())
    assert main([str(file), *WORDS, *words]) == 0 and printed in capsys.readouterr().out


class Api:
    """Kubernetes' client; each call has this answer, or fails with its HTTP status."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __getattr__(self, name: str) -> Any:
        def call(*_: object, **options: object) -> object:
            if isinstance(self.answer, int):
                raise ApiException(self.answer, "no")
            return SimpleNamespace(data=json.dumps(self.answer)) if "_preload_content" in options else self.answer

        call.__name__ = name
        return call


def test_absence_and_conflict_are_answers_of_the_api_server(monkeypatch: Any) -> None:
    def cluster(answer: object) -> Kubernetes:
        for name in ("CustomObjectsApi", "CoreV1Api"):
            monkeypatch.setattr(kubernetes.client, name, lambda _: Api(answer))
        return Kubernetes(Access(), "enginesmith", "enginesmith-ray")

    connection = SimpleNamespace(configuration=SimpleNamespace(host="h"))
    monkeypatch.setattr("pipeline.orchestration.kuberay.apply.connection_to", lambda _: connection)
    assert cluster(404).find() is None and cluster(GONE).find() == GONE
    assert [cluster(answer).replace(LESS) for answer in (404, 409, LESS)] == [False, False, True]
    pod: Object = {"metadata": {"name": "x"}}
    last_fields = {"metadata": {"name": "y", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert [item.name for item in cluster({"items": [pod, last_fields]}).pods()] == ["x"]
    with pytest.raises(UnavailableError, match="h has no resource RayCluster; install the KubeRay operator"):
        cluster(404).create(GONE)
    for status, call in ((409, "find"), (403, "pods"), (500, "find")):
        with pytest.raises(UnavailableError, match=rf"^h: \w+: {status}: no$"):
            getattr(cluster(status), call)()


@pytest.mark.parametrize("demands", [("ray_task_actor_demand",), ("placement_group_demand",), ()])
def test_the_heads_list_of_workers_is_read(demands, monkeypatch):
    kinds = ("ray_task_actor_demand", "placement_group_demand")
    node = SimpleNamespace(instance_id="a", node_id="node-a")
    resources = SimpleNamespace(**{kind: ["one"] if kind in demands else [] for kind in kinds})
    status = SimpleNamespace(active_nodes=[node], resource_demands=resources)
    monkeypatch.setattr(socket, "create_connection", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("ray.autoscaler.v2.sdk.get_cluster_status", lambda _: status)
    assert RayHead("127.0.0.1:9").load() == Load({"a": "node-a"}, queued=bool(demands))
