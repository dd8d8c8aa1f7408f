"""What Kubernetes objects have in common: annotations by name, a RayCluster's worker groups by name."""

from collections.abc import Mapping

from enginery.core.documents import find, read

Object = Mapping[str, object]


def annotations_of(item: Object) -> dict[str, str]:
    """The annotations by name."""
    return find(item, "metadata.annotations", dict, {})


def groups_of(cluster: Object) -> dict[str, Object]:
    """The worker groups of a RayCluster by name."""
    found = find(cluster, "spec.workerGroupSpecs", list, [])
    return {read(group, "groupName", str): group for group in found}
