"""values.schema.json, made from values.yaml: its keys and types, closed, plus what a type cannot say.

A key that is not in values.yaml is refused, so that a misspelt value is no silent default.
"""

from collections.abc import Mapping
from typing import Any

from builders.targets import GENERATIONS

Schema = dict[str, Any]

QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
OPTIONAL_NAME = {"type": "string", "pattern": f"^({NAME})?$"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
OPEN = {"type": "object"}
PORTS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 65535}}
CIDRS = {"type": "array", "items": {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}}
PEERS = {"type": "array", "items": {"type": "object", "minProperties": 1}}
SECONDS = {"type": "integer", "minimum": 1}
COUNT = {"type": "integer", "minimum": 0}


def closed(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these keys and no others."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return {**found, "required": list(required)} if required else found


_TOLERATION = closed(
    {
        "key": {"type": "string"},
        "operator": {"enum": ["Exists", "Equal"]},
        "value": {"type": "string"},
        "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        "tolerationSeconds": COUNT,
    }
)
_AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}

# What a value is, by the last words of its path; the longest that fits wins.
RULES: dict[str, Schema] = {
    "affinity": OPEN,
    "annotations": STRINGS,
    "apiServer.cidrs": {**CIDRS, "minItems": 1},
    "bucket": {"type": "string", "pattern": r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$"},
    "catalog.content": OPEN,
    "catalog.key": {"type": "string", "pattern": r"^[A-Za-z0-9._-]+$"},
    "cidrs": CIDRS,
    "clusterUid": {"type": "string"},
    "commonLabels": STRINGS,
    "cpu": QUANTITY,
    "cpuRequest": QUANTITY,
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "endpoint": {"type": "string", "pattern": "^(https?://[^?#&]+)?$"},
    "existingClaim": OPTIONAL_NAME,
    "existingConfigMap": OPTIONAL_NAME,
    "existingSecret": OPTIONAL_NAME,
    "externalApi.url": {"type": "string", "pattern": "^(https?://.+/api.*)?$"},
    "extraEgress": {"type": "array", "items": {"type": "object"}},
    "extraEnv": {
        "type": "array",
        "items": closed({"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": OPEN}, "name"),
    },
    "failedBuildsPerHour": COUNT,
    "finishedJobTtlSeconds": COUNT,
    "fleet.schedule": {"type": "string", "pattern": r"^[0-9A-Za-z*/,-]+( [0-9A-Za-z*/,-]+){4}$"},
    "from": PEERS,
    "fullnameOverride": {"type": "string", "pattern": r"^([a-z]([a-z0-9-]*[a-z0-9])?)?$"},
    "gpuResource": {"type": "string", "pattern": r"^nvidia\.com/[a-z0-9.-]+$"},
    "gpusPerWorker": {"type": "integer", "minimum": 1},
    "idleTimeoutSeconds": SECONDS,
    "imagePullSecrets": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    "labels": STRINGS,
    "max": COUNT,
    "memory": QUANTITY,
    "memoryLimit": QUANTITY,
    "memoryRequest": QUANTITY,
    "min": COUNT,
    "namespaceSelector": OPEN,
    "nodeSelector": STRINGS,
    "pathStyle": {"type": ["boolean", "null"]},
    "podAnnotations": STRINGS,
    "podStartTimeoutSeconds": SECONDS,
    "ports": PORTS,
    "prefix": {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"},
    "pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
    "ray.version": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
    "replicas": {"type": "integer", "minimum": 1},
    "redis.cidrs": {**CIDRS, "minItems": 1},
    "redisAddress": {"type": "string", "pattern": r"^((rediss?://)?[A-Za-z0-9.-]+:[0-9]+)?$"},
    "registryErrors": COUNT,
    "repository": {"type": "string", "pattern": r"^[^@\s]*$"},
    "resources": closed({"requests": _AMOUNTS, "limits": _AMOUNTS}),
    "runAsGroup": {"type": "integer", "minimum": 1},
    "runAsUser": {"type": "integer", "minimum": 1},
    "scrapeTimeout": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    "size": QUANTITY,
    "sse": {"enum": ["", "AES256", "aws:kms", "aws:kms:dsse"]},
    "tolerations": {"type": "array", "items": _TOLERATION},
    "traffic": {"type": "string", "pattern": "^(s3://.+|file://.+)?$"},
    "uiApiUrl": {"type": "string", "pattern": "^https?://.+"},
    "unprovenEngines": COUNT,
    "upscalingMode": {"enum": ["Default", "Conservative", "Aggressive"]},
    "waitForNodes": {"type": "string", "pattern": "^[0-9]+[smhd]$"},
    "workPool": {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$"},
}

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", str: "string"}


def values_schema(values: Mapping[str, Any]) -> Schema:
    """The schema of a chart's values. Raises TypeError for a default that says nothing of what may be given."""
    found = _object(values, ())
    found["properties"]["gpuGroups"] = {"type": "array", "items": _group(found["properties"]["gpuGroupDefaults"])}
    # Helm adds it for a chart that is a dependency of another one.
    found["properties"]["global"] = OPEN
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Enginery chart", **found}


def _object(values: Mapping[str, Any], path: tuple[str, ...]) -> Schema:
    return closed({name: _value(value, (*path, name)) for name, value in values.items() if name != "gpuGroups"})


def _value(value: Any, path: tuple[str, ...]) -> Schema:
    for length in range(len(path), 0, -1):
        if rule := RULES.get(".".join(path[-length:])):
            return rule
    if isinstance(value, dict) and value:
        return _object(value, path)
    if type(value) in _TYPES:
        return {"type": _TYPES[type(value)]}
    raise TypeError(
        f"{'.'.join(path)}: {value!r} does not say what may be given; add a rule to charts/values_schema.py"
    )


def _group(defaults: Schema) -> Schema:
    """One of gpuGroups: every default, and what has none."""
    names = [generation.sm for generation in GENERATIONS]
    own = {
        # Of a Ray worker group, and a part of the names of its pods and deployments.
        "name": {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"},
        "generation": {"enum": names},
        "max": COUNT,
    }
    return closed({**own, **defaults["properties"]}, "name", "generation", "max")
