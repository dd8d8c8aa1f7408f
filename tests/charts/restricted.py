"""Pod Security "restricted", as a function: what of a pod spec it refuses.

Source: Kubernetes, Pod Security Standards (v1.34), the tables "Baseline" and "Restricted".
"""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def violations(spec: dict[str, Any]) -> list[str]:
    """Every rule that a pod spec breaks, in words."""
    pod = spec.get("securityContext", {})
    items = [f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    for volume in spec.get("volumes", ()):
        items += [f"volume {volume['name']} is of kind {kind}" for kind in volume.keys() - {"name"} - VOLUMES]
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        items += [f"{container['name']}: {reason}" for reason in _container(container, pod)]
    return items


def _container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own_context = container.get("securityContext", {})
    if own_context.get("privileged"):
        yield "privileged"
    if own_context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = own_context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "does not drop ALL capabilities"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"adds {capabilities['add']}"
    if own_context.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own_context.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runs as root"
    profile = own_context.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"seccomp profile {profile}"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"
