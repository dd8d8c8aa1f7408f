"""What every test here gets: a control plane, its own namespace, Helm in it, the kubelet's ear. README.md says more."""

import logging
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import ray_job
from tests.cluster.api import Api, Object, wait_for
from tests.cluster.assets import Assets, assets
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubelet import Kubelet
from tests.cluster.release import Release, sample

log = logging.getLogger("cluster")
# Of the sample values: Prefect's server and worker, metrics, Ray's head, a worker for each kind of GPU.
PODS = 9


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test pays for the start of a control plane."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))


@dataclass
class Cluster:
    """api: the API as an administrator.  plane: its processes, kubeconfigs and tokens."""

    plane: ControlPlane
    api: Api
    kubelet: Kubelet

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace with what the sample values name, under Pod Security `restricted`; deleted at the end."""
        full_name = f"{name}-{uuid.uuid4().hex[:5]}"
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.api.create("namespaces", "", {"metadata": {"name": full_name, "labels": labels}})
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
        self.api.create("secrets", full_name, {"metadata": {"name": "enginesmith-registry-keys"}, "stringData": keys})
        try:
            yield full_name
        finally:
            self.kubelet.release()
            self.api.delete("namespaces", "", full_name)

    def pods(self, namespace: str, labels: str = "") -> dict[str, Object]:
        """Pods by name, without those that the RayCluster is applied by every five minutes; `labels` is a selector."""
        selector = ",".join(filter(None, [labels, "app.kubernetes.io/component!=ray-apply"]))
        return {pod["metadata"]["name"]: pod for pod in self.api.list("pods", namespace, selector)}

    def running(self, namespace: str, count: int) -> dict[str, Object]:
        """The pods of a namespace by name, as soon as they are `count` and all run."""

        def look() -> dict[str, Object] | None:
            result = self.pods(namespace)
            is_all_run = all(pod["status"].get("phase") == "Running" for pod in result.values())
            return result if is_all_run and len(result) == count else None

        return wait_for(f"{count} running pods", look)

    def autoscale(self, namespace: str, group: str, workers: int) -> None:
        """Set a worker group's replicas as Ray's autoscaler does: it then owns the list of groups."""
        name = "enginesmith-ray"
        groups = self.api.get("rayclusters", namespace, name)["spec"]["workerGroupSpecs"]
        index = [item["groupName"] for item in groups].index(group)
        patch = [{"op": "replace", "path": f"/spec/workerGroupSpecs/{index}/replicas", "value": workers}]
        self.account(namespace, name).patch("rayclusters", namespace, name, patch, "python-requests")
        log.info("the autoscaler (manager python-requests) sets replicas of group %s to %d", group, workers)

    def account(self, namespace: str, name: str) -> Api:
        return self.plane.api(self.token(namespace, name))

    def token(self, namespace: str, name: str) -> str:
        """A service account's token, as a kubelet asks for it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        return str(self.api.ask("POST", path, {"spec": {}})["status"]["token"])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One control plane for all tests, ended by pid at the end, at Ctrl-C and at SIGTERM."""
    actual = assets()
    if not isinstance(actual, Assets):
        pytest.skip(actual)
    plane = ControlPlane(actual, tmp_path_factory.mktemp("cluster"))
    signal_before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    kubelet = None
    try:
        plane.start()
        kubelet = Kubelet(plane.api())
        played_cluster = Cluster(plane, plane.api(), kubelet)
        kubelet.run("ray-apply", lambda pod: ray_job.run(played_cluster, pod))
        kubelet.start()
        yield played_cluster
    finally:
        if kubelet:
            kubelet.stop()
        plane.stop()
        signal.signal(signal.SIGTERM, signal_before)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    with cluster.namespace("test") as name:
        yield name


@pytest.fixture
def kubelet(cluster: Cluster) -> Iterator[Kubelet]:
    """The kubelet, told what to do with pods for this test alone."""
    yield cluster.kubelet
    cluster.kubelet.release()


@pytest.fixture
def helm(cluster: Cluster, namespace: str) -> Iterator[Release]:
    """The chart's release in this test's namespace; uninstalled at the end, since policies are in no namespace."""
    release = Release(cluster.plane, namespace)
    yield release
    release.remove()


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Release]:
    """The sample values installed, once for all tests of a file that change nothing of it; all pods run."""
    with cluster.namespace("installed") as namespace:
        release = Release(cluster.plane, namespace)
        release.install(sample())
        cluster.running(namespace, PODS)
        yield release
        release.remove()
