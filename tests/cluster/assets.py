"""The programs of a control plane, from the folder that KUBE_ASSETS names."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kuberay-operator")


@dataclass(frozen=True)
class Assets:
    """programs: each one's path, by name.  crds: files with custom resource definitions, KubeRay's among them."""

    programs: dict[str, Path]
    crds: tuple[Path, ...]


def assets() -> Assets | str:
    """What KUBE_ASSETS names, or the reason why no control plane can be started. etcd may be on PATH instead."""
    assets_path = os.environ.get("KUBE_ASSETS")
    if not assets_path:
        return f"KUBE_ASSETS names no folder with {', '.join(PROGRAMS)} and crds/ (tests/cluster/README.md)"
    folder = Path(assets_path)
    result = {name: folder / name for name in PROGRAMS}
    if not result["etcd"].exists() and (etcd_path := shutil.which("etcd")):
        result["etcd"] = Path(etcd_path)
    crds = tuple(sorted(folder.glob("crds/*.yaml")))
    missing_names = [name for name, path in result.items() if not os.access(path, os.X_OK)]
    missing_names += [] if any(path.name.startswith("ray.io_") for path in crds) else ["crds/ray.io_*.yaml"]
    if missing_names:
        return f"KUBE_ASSETS={assets_path} lacks {', '.join(missing_names)} (tests/cluster/README.md)"
    return Assets(result, crds)
