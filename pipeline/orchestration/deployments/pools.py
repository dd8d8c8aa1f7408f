"""Base job templates of work pools, by kind: Prefect's own, and for Kubernetes what a GPU build needs beside that."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from enginery.core.errors import InputError


def template(kind: str) -> dict[str, Any]:
    """The base job template of a kind of pool ('process', 'kubernetes')."""
    found: dict[str, Any] = json.loads((files("pipeline.orchestration.deployments") / f"{kind}.json").read_text())
    return found


def check_variables(kind: str, given: Mapping[str, Any]) -> None:
    """Raise InputError for a job variable that the pool's template does not have."""
    known = template(kind)["variables"]["properties"]
    for name in given:
        if name not in known:
            raise InputError(f"job variable {name!r} is none of a {kind} pool, which has {', '.join(sorted(known))}")
