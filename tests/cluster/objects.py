"""What is in a namespace, and what is left there after a while."""

from tests.cluster.api import wait_for
from tests.cluster.conftest import Cluster

# Every namespace has these (and certificates, configmaps/...crt); the Secret was there before the release.
OTHERS = {"serviceaccounts/default", "secrets/enginesmith-registry-keys"}
IN_NAMESPACES = (
    "configmaps", "cronjobs", "deployments", "jobs", "networkpolicies", "persistentvolumeclaims",
    "poddisruptionbudgets", "pods", "rayclusters", "rolebindings", "roles", "secrets", "serviceaccounts", "services",
)  # fmt: skip
IN_NONE = ("clusterroles", "clusterrolebindings", "validatingadmissionpolicies", "validatingadmissionpolicybindings")


def everything(cluster: Cluster, namespace: str) -> set[str]:
    """'jobs/enginesmith-deploy' of all in a namespace, or in none and named by it, that was not there before."""
    kinds = [(kind, item) for kind in IN_NAMESPACES for item in cluster.api.list(kind, namespace)]
    extra_kinds = [(kind, item) for kind in IN_NONE for item in cluster.api.list(kind)]
    kinds += [(kind, item) for kind, item in extra_kinds if namespace in item["metadata"]["name"]]
    result = {f"{kind}/{item['metadata']['name']}" for kind, item in kinds}
    return {name for name in result - OTHERS if not name.endswith(".crt")}


def still(cluster: Cluster, namespace: str, count: int) -> set[str]:
    """What is left as soon as it is no more than `count` objects; the garbage collector takes its time."""

    def look() -> tuple[set[str]] | None:
        result = everything(cluster, namespace)
        return (result,) if len(result) <= count else None

    try:
        return wait_for(f"{count} objects", look)[0]
    except TimeoutError:
        return everything(cluster, namespace)
