"""Generates values.schema.json from values.yaml: its keys and types, and `RULES` that types cannot express.

Keys that are not in values.yaml are refused; a misspelt key would otherwise leave the default without a message.
"""

from collections.abc import Mapping
from typing import Any

from charts.kubernetes_names import (
    ANNOTATIONS,
    CIDR,
    KEY,
    LABEL_NAME,
    LABELS,
    MORE_THAN_0,
    NAME,
    OPTIONAL_LABEL_NAME,
    OPTIONAL_NAME,
    PART,
    SELECTOR,
    Schema,
    closed,
    listed,
    ref,
)
from charts.kubernetes_schema import DEFINITIONS, EGRESS
from enginesmith.core.hardware.machine import GENERATIONS, names
from enginesmith.core.types import PRECISIONS

# A whole number of CPUs may be an integer; templates would write one from a million on with an exponent. A size without
# a unit has at least 7 digits, since `16` and `512m` are mistakes. Neither may be 0.
CPU = {
    "type": ["string", "integer"],
    "minimum": 1,
    "maximum": 99_999,
    "pattern": rf"^{MORE_THAN_0}$|^[0-9]*[1-9][0-9]*m$",
}
BYTES = {"type": "string", "pattern": rf"^([1-9][0-9]{{6,}}|{MORE_THAN_0}(k|Ki|M|Mi|G|Gi|T|Ti))$"}
# Host and port, then words in lower case. Templates refuse a tag, and name the remedy.
_WORD = "[a-z0-9]+([._-]+[a-z0-9]+)*"
IMAGE = rf"^(([A-Za-z0-9.-]+(:[0-9]+)?/)?{_WORD}(/{_WORD})*(:[^/@\s]*)?)?$"
OPEN = {"type": "object"}
PORTS = listed({"type": "integer", "minimum": 1, "maximum": 65535})
CIDRS = {"type": "array", "items": CIDR}
SECONDS = {"type": "integer", "minimum": 1}
COUNT = {"type": "integer", "minimum": 0}
# The templates check the range of ports, with a message in words.
_HOST = r"([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
_AT = rf"{_HOST}(:[0-9]+)?"
_PROXY = {"type": "string", "pattern": rf"^(https?://([A-Za-z0-9.:%_-]+@)?{_AT}/?)?$"}
# A size as the command line accepts it, below 2**63 bytes.
SIZE = {"type": "string", "pattern": "^[1-9]([0-9]{0,11}(B|KiB)?|[0-9]{0,8}(MiB|GiB)|[0-9]{0,5}TiB)$"}
# An item of nodeCache.pulls. Its name is part of a DaemonSet's name, and a folder's name.
PULL = closed(
    {
        "name": {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$"},
        "reference": {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]*(:[a-z0-9][a-z0-9._-]*)?$"},
        "target": {"enum": names()},
        "args": {"type": "array", "items": {"type": "string"}},
        "nodeSelector": LABELS,
    },
    "name",
    "reference",
    "target",
)
# A parent of an HTTPRoute (gateway.networking.k8s.io/v1).
PARENT = closed(
    {
        "name": NAME,
        "namespace": LABEL_NAME,
        "group": OPTIONAL_NAME,
        "kind": {"type": "string", "maxLength": 63, "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"},
        "sectionName": NAME,
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "name",
)


def _catalog() -> Schema:
    """A fleet's catalog, as in pipeline/fleet/catalog.py. YAML reads the bare key `on` as true, Helm as "true"."""
    version = {"type": ["string", "number"]}
    on = listed({"enum": names()})
    serve = closed(
        {
            "model": {"type": "string", "minLength": 1},
            "channel": {"type": "string"},
            "version": {"type": "string"},
            "on": on,
            "true": on,
            "precisions": {"type": "array", "items": {"enum": list(PRECISIONS)}},
            "proven": {"type": "boolean"},
        },
        "model",
    )
    versions = {"type": "object", "additionalProperties": version}  # by the package's name
    return closed({"serve": listed(serve), "runtimes": versions, "planned": versions})


_AMOUNTS = closed({"cpu": CPU, "memory": BYTES, "ephemeral-storage": BYTES})

# The end of a value's path -> its schema; the longest match applies.
RULES: dict[str, Schema] = {
    "affinity": ref("affinity"),
    "nodeCache.bytes": SIZE,
    "nodeCache.existingClaim": OPTIONAL_NAME,
    # The templates check which folders are allowed.
    "nodeCache.hostPath": {"type": "string", "pattern": r"^(/[A-Za-z0-9][A-Za-z0-9._-]*)+$"},
    "nodeCache.interval": SECONDS,
    "nodeCache.namespace": {"anyOf": [LABEL_NAME, {"const": ""}]},
    "nodeCache.through": {"type": "string", "pattern": r"^\S*$"},
    "nodeCache.pulls": {"type": "array", "items": PULL},
    "annotations": ANNOTATIONS,
    "apiServer.cidrs": {**CIDRS, "minItems": 1},
    "account": {"type": "string", "pattern": "^([a-z0-9]{3,24})?$"},
    "bucket": {"type": "string", "pattern": r"^([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])?$"},
    "canary.duration": {"type": "string", "pattern": "^([1-9][0-9]{0,5}[smhd])?$"},
    "canary.channel": {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"},
    "catalog.content": _catalog(),
    "catalog.place": {"type": "string", "pattern": "^(registered|(s3|gs|az)://.+|file:///.+)$"},
    "cidrs": CIDRS,
    "className": OPTIONAL_NAME,
    "clusterUid": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9 ._:/-]*)?$"},
    "commonAnnotations": ANNOTATIONS,
    "commonLabels": LABELS,
    "cpu": CPU,
    "cpuRequest": CPU,
    "cpuPercent": {"type": "integer", "minimum": 1},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "endpoint": {"type": "string", "pattern": rf"^(https?://{_AT}(/[^?#&\s]*)?)?$"},
    "existingClaim": OPTIONAL_NAME,
    "existingConfigMap": OPTIONAL_NAME,
    "existingSecret": OPTIONAL_NAME,
    "externalApi.url": {"type": "string", "pattern": rf"^(https?://{_AT}(/\S*)?/api\S*)?$"},
    "readSecret": OPTIONAL_NAME,
    "configMap": OPTIONAL_NAME,
    "except": {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z0-9.:/*_-]+$"}},
    "extraContainers": ref("sidecars"),
    "extraEgress": {"type": "array", "items": EGRESS},
    "extraEnv": ref("env"),
    "extraEnvFrom": ref("envFrom"),
    "extraInitContainers": ref("containers"),
    "extraVolumeMounts": ref("mounts"),
    "extraVolumes": ref("volumes"),
    "failedBuildsPerHour": COUNT,
    "finishedJobTtlSeconds": COUNT,
    # The templates check its content, with a message in words.
    "fleet.schedule": {"type": "string", "minLength": 1},
    "from": ref("peers"),
    "fsGroup": {"type": ["integer", "null"], "minimum": 1},
    "fullnameOverride": {"type": "string", "pattern": r"^([a-z]([a-z0-9-]*[a-z0-9])?)?$"},
    "gpuResource": {"type": "string", "pattern": r"^nvidia\.com/[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"},
    "gpusPerWorker": {"type": "integer", "minimum": 1},
    "idleTimeoutSeconds": SECONDS,
    "imagePullSecrets": {"type": "array", "items": NAME, "uniqueItems": True},
    "interval": {"type": "string", "pattern": "^[1-9][0-9]{0,5}(ms|s|m|h)$"},
    "key": KEY,
    "labels": LABELS,
    "logLevel": {"enum": ["", "DEBUG", "INFO", "WARNING", "ERROR"]},
    "max": {"type": "integer", "minimum": 1},
    "memory": BYTES,
    "memoryLimit": BYTES,
    "memoryRequest": BYTES,
    "min": COUNT,
    "name": OPTIONAL_NAME,
    "namespaceSelector": SELECTOR,
    "nameOverride": {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$"},
    "nodeSelector": LABELS,
    "parentRefs": {"type": "array", "items": PARENT, "maxItems": 32, "uniqueItems": True},
    "pathStyle": {"type": ["boolean", "null"]},
    "podAnnotations": ANNOTATIONS,
    "podLabels": LABELS,
    "podStartTimeoutSeconds": SECONDS,
    "ports": PORTS,
    "prefix": {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"},
    "priorityClass": OPTIONAL_LABEL_NAME,
    "priorityClassName": OPTIONAL_NAME,
    "proxy.http": _PROXY,
    "proxy.https": _PROXY,
    "pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
    "queueName": OPTIONAL_LABEL_NAME,
    "ray.version": {"type": "string", "pattern": r"^(0|[1-9][0-9]{0,5})(\.(0|[1-9][0-9]{0,5})){2}$"},
    "replicas": {"type": "integer", "minimum": 1},
    "redisAddress": {"type": "string", "pattern": rf"^((rediss?://)?{_HOST}:[0-9]+)?$"},
    "registryErrors": COUNT,
    "registry.kmsKey": {"type": "string", "pattern": r"^[A-Za-z0-9:/_.-]*$"},
    "registry.region": {"type": "string", "pattern": "^[a-z0-9-]{0,64}$"},
    "repository": {"type": "string", "pattern": IMAGE},
    "keda.prometheus": {"type": "string", "pattern": rf"^(https?://{_AT}(/[^?#\s]*)?)?$"},
    "resourceClaimTemplate": OPTIONAL_NAME,
    "resources": ref("resources"),
    "rolloutHours": {"type": "integer", "minimum": 1},
    "runAsGroup": {"type": ["integer", "null"], "minimum": 1},
    "runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "runtimeClassName": OPTIONAL_NAME,
    "scrapeTimeout": {"type": "string", "pattern": "^[1-9][0-9]{0,5}(ms|s|m|h)$"},
    "scheme": {"enum": ["s3", "gs", "az"]},
    # No IP address: an Ingress takes none.
    "site.host": {**OPTIONAL_NAME, "pattern": rf"^(({PART}\.)*[a-z]([a-z0-9-]*[a-z0-9])?)?$"},
    "site.path": {"type": "string", "pattern": "^(/[A-Za-z0-9_-]+)+$", "maxLength": 1024},
    "serviceAnnotations": ANNOTATIONS,
    "size": BYTES,
    "sse": {"enum": ["", "AES256", "aws:kms", "aws:kms:dsse"]},
    "storageClass": OPTIONAL_NAME,
    "tag": {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"},
    "tlsSecret": OPTIONAL_NAME,
    "tolerations": ref("tolerations"),
    "topologySpreadConstraints": ref("spread"),
    "traffic": {"type": "string", "pattern": "^((s3|gs|az)://.+|file://.+)?$"},
    "uiApiUrl": {"type": "string", "pattern": rf"^https?://{_AT}(/[A-Za-z0-9._~/-]*)?$", "maxLength": 264},
    "unprovenEngines": COUNT,
    "upscalingMode": {"enum": ["Default", "Conservative", "Aggressive"]},
    "waiting": {"type": "integer", "minimum": 1},
    "waitForNodes": {"type": "string", "pattern": "^[0-9]{1,6}[smhd]$"},
    "workPool": {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$"},
}

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", str: "string"}


def values_schema(values: Mapping[str, Any]) -> Schema:
    """The schema of a chart's values. Raises TypeError for a default that does not show which values are allowed."""
    schema = _object(values, ())
    schema["properties"]["gpuGroups"] = {"type": "array", "items": _group(schema["properties"]["gpuGroupDefaults"])}
    # Helm adds this key to a chart that is a dependency of another.
    schema["properties"]["global"] = OPEN
    title = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Enginesmith chart"}
    resources = closed({"requests": _AMOUNTS, "limits": _AMOUNTS})
    return dict(_bounded({**title, **schema, "definitions": {**DEFINITIONS, "resources": resources}}))


def _bounded(schema: Any) -> Any:
    """The same schema, with a maximum for each integer that has none: that of an int32, the API server's type."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bounded(value) for name, value in schema.items()}
    types = bounded.get("type")
    limited = types == "integer" or (isinstance(types, list) and "integer" in types)
    return {"maximum": 2**31 - 1} | bounded if limited else bounded


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
    """An item of gpuGroups: the values with defaults, and those without."""
    own: dict[str, Schema] = {
        # The name of a Ray worker group, and part of the names of its pods and deployments.
        "name": {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"},
        "generation": {"enum": [generation.sm for generation in GENERATIONS]},
        "max": {"type": "integer", "minimum": 1},
    }
    return closed({**own, **defaults["properties"]}, "name", "generation", "max")
