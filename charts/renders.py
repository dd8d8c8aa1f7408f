"""Renders the chart: golden files of the sample values, and plain manifests for people without Helm."""

import re
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = Path(__file__).parent / "enginesmith"
SAMPLES = ("minimal", "aws", "gke", "aks", "onprem")

# The files of manifests/enginesmith, and the templates that each holds.
MANIFESTS = {
    "accounts": ("serviceaccounts",),
    "network": ("network/",),
    "prefect": ("prefect/",),
    "ray": ("ray/",),
    "metrics": ("metrics/",),
    "site": ("site/",),
    "disruption": ("pdb",),
}


def rendered(
    values: dict[str, Any], name: str = "enginesmith", namespace: str = "enginesmith", **options: Any
) -> dict[str, str]:
    """Templates by path ('ray/cluster.yaml') as `helm template` prints them; those that print nothing are left out.

    Raises helm.HelmError: HelmValuesError for values that the schema refuses, HelmRenderError if a template does.
    """
    with helm.Chart.load(str(CHART)) as chart:
        chart_text = chart.render(values, name=name, namespace=namespace, **options)
    texts = {path.split("/templates/", 1)[1]: _tidy(text) for path, text in chart_text.items() if "/templates/" in path}
    return {path: text for path, text in sorted(texts.items()) if text}


def objects(texts: dict[str, str]) -> list[dict[str, Any]]:
    """All Kubernetes objects in rendered templates."""
    return [item for path, text in texts.items() if path.endswith(".yaml") for item in objects_in(text)]


def objects_in(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file, and the RayCluster in a ConfigMap, which a Job creates from it."""
    manifests_found = [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    inside = [item["data"]["raycluster.yaml"] for item in manifests_found if "raycluster.yaml" in item.get("data", {})]
    return manifests_found + [yaml.load(item, yaml.CSafeLoader) for item in inside]


def sample(name: str) -> dict[str, Any]:
    """The values of a sample file."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


def golden(name: str) -> str:
    """Everything that a sample renders to, with the notes."""
    parts = (f"# {path}\n{text}" for path, text in rendered(sample(name)).items())
    return "---\n".join(parts)


def manifests(values: dict[str, Any]) -> dict[str, str]:
    """The plain manifests, by file name: no hooks, no tests, no labels about Helm."""
    texts = rendered(values)
    parts_by_name = {}
    for name, places in MANIFESTS.items():
        parts = [_plain(text) for path, text in texts.items() if path.startswith(places)]
        parts_by_name[f"{name}.yaml"] = _HEAD + "---\n".join(parts)
    return parts_by_name


_HEAD = "# Made from charts/enginesmith and manifests/values.yaml by `make chart`; changes belong there.\n"


def _plain(text: str) -> str:
    gone = re.compile(r"^ *(helm\.sh/chart: .*|app\.kubernetes\.io/managed-by: Helm)\n", re.MULTILINE)
    return gone.sub("", text)


def _tidy(text: str) -> str:
    """The text without empty lines, and without documents that are empty or only comments."""
    lines = "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
    parts = [part.strip("\n") for part in re.split(r"^---$", lines, flags=re.MULTILINE)]
    kept_parts = [part for part in parts if part and not all(line.startswith("#") for line in part.splitlines())]
    return "".join(f"{part}\n" for part in ["\n---\n".join(kept_parts)] if part)
