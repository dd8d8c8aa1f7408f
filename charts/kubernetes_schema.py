"""Schemas of parts of Kubernetes objects in the chart's values: they refuse values before the API server would.

Source: Kubernetes API reference (core/v1 Affinity, Toleration, TopologySpreadConstraint, EnvVar, Volume, Container;
networking.k8s.io/v1 NetworkPolicyPeer).
"""

from charts.kubernetes_names import (
    ANNOTATIONS,
    CIDR,
    KEY,
    LABEL_KEY,
    LABEL_NAME,
    LABEL_VALUE,
    LABELS,
    MORE_THAN_0,
    NAME,
    SELECTOR,
    Schema,
    closed,
    listed,
    named,
    ref,
)


def _expression(key: Schema, value: Schema, *more: str) -> Schema:
    """One requirement on labels: `In` and `NotIn` need values, `Exists` and `DoesNotExist` take none, others one."""
    values = {"type": "array", "items": value}
    schema = closed(
        {"key": key, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist", *more]}, "values": values}
    )
    sizes = {
        ("In", "NotIn"): {"minItems": 1},
        ("Exists", "DoesNotExist"): {"maxItems": 0},
        more: {"minItems": 1, "maxItems": 1},
    }
    rules = [
        {
            "if": {"properties": {"operator": {"enum": list(operators)}}},
            "then": {"properties": {"values": size}, **({"required": ["values"]} if "minItems" in size else {})},
        }
        for operators, size in sizes.items()
        if operators
    ]
    return {**schema, "required": ["key", "operator"], "allOf": rules}


_EXPRESSION = _expression(LABEL_KEY, LABEL_VALUE)
_SELECTOR: Schema = closed({"matchLabels": LABELS, "matchExpressions": {"type": "array", "items": _EXPRESSION}})

_NODE_EXPRESSION = _expression(LABEL_KEY, LABEL_VALUE, "Gt", "Lt")
_NODE_FIELD = closed(
    {
        "key": {"const": "metadata.name"},
        "operator": {"enum": ["In", "NotIn"]},
        "values": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 1},
    },
    "key", "operator", "values",
)  # fmt: skip
# An empty term is refused, because it matches no node.
_NODE_TERM = {
    **closed({"matchExpressions": listed(_NODE_EXPRESSION), "matchFields": listed(_NODE_FIELD)}),
    "minProperties": 1,
}
_POD_TERM = closed(
    {
        "topologyKey": LABEL_KEY,
        "labelSelector": SELECTOR,
        "namespaces": {"type": "array", "items": LABEL_NAME},
        "namespaceSelector": SELECTOR,
        "matchLabelKeys": {"type": "array", "items": LABEL_KEY},
        "mismatchLabelKeys": {"type": "array", "items": LABEL_KEY},
    },
    "topologyKey",
)
_POD_TERM["dependencies"] = {key: ["labelSelector"] for key in ("matchLabelKeys", "mismatchLabelKeys")}
_WEIGHT: Schema = {"type": "integer", "minimum": 1, "maximum": 100}
_DURING = "DuringSchedulingIgnoredDuringExecution"
_REQUIRED, _PREFERRED = f"required{_DURING}", f"preferred{_DURING}"


def _pods_together() -> Schema:
    weighted = closed({"weight": _WEIGHT, "podAffinityTerm": _POD_TERM}, "weight", "podAffinityTerm")
    return closed({_REQUIRED: {"type": "array", "items": _POD_TERM}, _PREFERRED: {"type": "array", "items": weighted}})


_AFFINITY: Schema = closed(
    {
        "nodeAffinity": closed(
            {
                _REQUIRED: closed({"nodeSelectorTerms": listed(_NODE_TERM)}, "nodeSelectorTerms"),
                _PREFERRED: {
                    "type": "array",
                    "items": closed({"weight": _WEIGHT, "preference": _NODE_TERM}, "weight", "preference"),
                },
            }
        ),
        "podAffinity": _pods_together(),
        "podAntiAffinity": _pods_together(),
    }
)

_TOLERATION: Schema = {
    **closed(
        {
            "key": {"type": "string", "pattern": f"^$|{LABEL_KEY['pattern']}"},
            "operator": {"enum": ["Exists", "Equal"]},
            "value": LABEL_VALUE,
            "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            "tolerationSeconds": {"type": "integer", "minimum": 0},
        }
    ),
    "dependencies": {"tolerationSeconds": {"properties": {"effect": {"const": "NoExecute"}}, "required": ["effect"]}},
    # `Exists` takes no value; any other operator needs a key.
    "if": {"properties": {"operator": {"const": "Exists"}}, "required": ["operator"]},
    "then": {"properties": {"value": {"const": ""}}},
    "else": {"properties": {"key": LABEL_KEY}, "required": ["key"]},
}

_SPREAD: Schema = closed(
    {
        "maxSkew": {"type": "integer", "minimum": 1},
        "topologyKey": LABEL_KEY,
        "whenUnsatisfiable": {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
        "labelSelector": SELECTOR,
        "minDomains": {"type": "integer", "minimum": 1},
        "nodeAffinityPolicy": {"enum": ["Honor", "Ignore"]},
        "nodeTaintsPolicy": {"enum": ["Honor", "Ignore"]},
        "matchLabelKeys": {"type": "array", "items": LABEL_KEY},
    },
    "maxSkew",
    "topologyKey",
    "whenUnsatisfiable",
)
_SPREAD["dependencies"] = {"minDomains": {"properties": {"whenUnsatisfiable": {"const": "DoNotSchedule"}}}}


def _ref(**more: Schema) -> Schema:
    return closed({"name": NAME, "optional": {"type": "boolean"}, **more}, "name", *more)


_VARIABLE: Schema = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"}
_KEYED = rf"metadata\.(labels|annotations)\['{LABEL_KEY['pattern'].strip('^$')}'\]"
_FIELD = rf"^(metadata\.(name|namespace|uid)|{_KEYED}|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$"
_FILE_FIELD = rf"^(metadata\.(name|namespace|uid|labels|annotations)|{_KEYED})$"


def _field(path: str) -> Schema:
    return closed({"fieldPath": {"type": "string", "pattern": path}, "apiVersion": {"const": "v1"}}, "fieldPath")


def _amount(*required: str) -> Schema:
    """A reference to a container's request or limit: CPUs in units of 1 or 0.001, sizes in units of at least 1 byte."""
    name = {"containerName": LABEL_NAME}
    cpu = {"type": "string", "pattern": r"^(limits|requests)\.cpu$"}
    space = {"type": "string", "pattern": r"^(limits|requests)\.(memory|ephemeral-storage)$"}
    units = ["1", *(f"1{size}{power}" for size in "MGTPE" for power in ("", "i")), "1k", "1Ki"]
    return {
        "anyOf": [
            closed({**name, "resource": cpu, "divisor": {"enum": ["1m", "1"]}}, "resource", *required),
            closed({**name, "resource": space, "divisor": {"enum": units}}, "resource", *required),
        ]
    }


_FROM = closed(
    {
        "secretKeyRef": _ref(key=KEY),
        "configMapKeyRef": _ref(key=KEY),
        "fieldRef": _field(_FIELD),
        "resourceFieldRef": _amount(),
    }
)
_ENV: Schema = closed(
    {"name": _VARIABLE, "value": {"type": "string"}, "valueFrom": {**_FROM, "minProperties": 1, "maxProperties": 1}},
    "name",
)
_ENV_FROM: Schema = {
    **closed({"secretRef": _ref(), "configMapRef": _ref(), "prefix": _VARIABLE}),
    "oneOf": [{"required": ["secretRef"]}, {"required": ["configMapRef"]}],
}

_FLAG, _TEXT = {"type": "boolean"}, {"type": "string", "minLength": 1}
_SIZE = {"type": "string", "pattern": rf"^{MORE_THAN_0}(k|Ki|M|Mi|G|Gi|T|Ti)?$"}
# A path in a volume or on a node, without the part '..'.
_PART = r"(\.?[^/.:][^/:]*|\.\.[^/:]+)"
_RELATIVE: Schema = {"type": "string", "pattern": f"^{_PART}(/{_PART})*/?$"}
_ABSOLUTE: Schema = {"type": "string", "pattern": f"^/({_PART}(/{_PART})*/?)?$"}
_MODE: Schema = {"type": "integer", "minimum": 0, "maximum": 0o777}


def _items(item: Schema) -> Schema:
    """Files of a volume, each from a key or a field."""
    return {"type": "array", "items": item}


def _files(name: str) -> dict[str, Schema]:
    file = closed({"path": _RELATIVE, "mode": _MODE, "key": KEY}, "path", "key")
    return {name: NAME, "items": _items(file), "optional": _FLAG}


_POD_FIELDS = _items(
    {
        **closed(
            {
                "path": _RELATIVE,
                "mode": _MODE,
                "fieldRef": _field(_FILE_FIELD),
                "resourceFieldRef": _amount("containerName"),
            },
            "path",
        ),
        "oneOf": [{"required": ["fieldRef"]}, {"required": ["resourceFieldRef"]}],
    }
)
_TOKEN = closed(
    {"path": _RELATIVE, "audience": _TEXT, "expirationSeconds": {"type": "integer", "minimum": 600}}, "path"
)
_SOURCE = {
    **closed(
        {
            "configMap": closed(_files("name"), "name"),
            "secret": closed(_files("name"), "name"),
            "downwardAPI": closed({"items": _POD_FIELDS}, "items"),
            "serviceAccountToken": _TOKEN,
            "clusterTrustBundle": {
                **closed(
                    {
                        "path": _RELATIVE,
                        "optional": _FLAG,
                        "name": NAME,
                        "signerName": _TEXT,
                        "labelSelector": SELECTOR,
                    },
                    "path",
                ),
                "oneOf": [{"required": ["name"]}, {"required": ["signerName"]}],
                "dependencies": {"labelSelector": ["signerName"]},
            },
        }
    ),
    "minProperties": 1,
    "maxProperties": 1,
}
_WORD: Schema = {"type": "string"}
_WORDS: Schema = {"type": "array", "items": _WORD}
_LUN: Schema = {"type": "integer", "minimum": 0, "maximum": 255}
_OBJECT = closed({"apiGroup": NAME, "kind": _TEXT, "name": NAME}, "kind", "name")
# Every kind except a claim needs an API group.
_OBJECT["anyOf"] = [{"properties": {"kind": {"const": "PersistentVolumeClaim"}}}, {"required": ["apiGroup"]}]
_MODES = listed({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"]})
# A claim that lives as long as its pod.
_CLAIM = closed(
    {
        "metadata": closed({"labels": LABELS, "annotations": ANNOTATIONS}),
        "spec": closed(
            {
                "accessModes": {"anyOf": [_MODES, {**listed({"const": "ReadWriteOncePod"}), "maxItems": 1}]},
                "resources": closed(
                    {"requests": closed({"storage": _SIZE}, "storage"), "limits": closed({"storage": _SIZE})},
                    "requests",
                ),
                "selector": SELECTOR,
                "dataSource": _OBJECT,
                "dataSourceRef": _OBJECT,
                "storageClassName": NAME,
                "volumeAttributesClassName": NAME,
                "volumeMode": {"const": "Filesystem"},
            },
            "accessModes",
            "resources",
        ),
    },
    "spec",
)
_CLAIM["properties"]["spec"]["not"] = {"required": ["dataSource", "dataSourceRef"]}
_HOST_TYPES = ("DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice")
_KINDS: dict[str, Schema] = {
    "configMap": closed({**_files("name"), "defaultMode": _MODE}, "name"),
    "csi": closed(
        {
            "driver": {**NAME, "maxLength": 63},
            "fsType": _TEXT,
            "nodePublishSecretRef": closed({"name": NAME}, "name"),
            "readOnly": _FLAG,
            "volumeAttributes": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "driver",
    ),
    "downwardAPI": closed({"items": _POD_FIELDS, "defaultMode": _MODE}),
    "emptyDir": closed(
        {"medium": {"enum": ["", "Memory", "HugePages"]}, "sizeLimit": {**_SIZE, "pattern": f"^0$|{_SIZE['pattern']}"}}
    ),
    "ephemeral": closed({"volumeClaimTemplate": _CLAIM}, "volumeClaimTemplate"),
    "fc": {
        **closed(
            {"targetWWNs": listed(_WORD), "wwids": listed(_WORD), "lun": _LUN, "fsType": _TEXT, "readOnly": _FLAG}
        ),
        "oneOf": [{"required": ["wwids"]}, {"required": ["targetWWNs"]}],
        "dependencies": {"targetWWNs": ["lun"]},
    },
    "hostPath": closed(
        {
            "path": _ABSOLUTE,
            "type": {"enum": ["", *_HOST_TYPES]},
        },
        "path",
    ),
    "image": closed({"reference": _TEXT, "pullPolicy": {"enum": ["Always", "Never", "IfNotPresent"]}}, "reference"),
    "iscsi": closed(
        {
            "targetPortal": _TEXT,
            "portals": _WORDS,
            "iqn": {
                "type": "string",
                "pattern": r"^(iqn\.\d{4}-\d{2}\.[a-z0-9.-]+:[^,;*&$|\s]+|eui\.[0-9A-Fa-f]{16}|naa\.[0-9A-Fa-f]{32})$",
            },
            "lun": _LUN,
            "iscsiInterface": _TEXT,
            "fsType": _TEXT,
            "readOnly": _FLAG,
            "secretRef": closed({"name": NAME}, "name"),
            **dict.fromkeys(("chapAuthDiscovery", "chapAuthSession"), _FLAG),
        },
        "targetPortal",
        "iqn",
        "lun",
    ),
    "nfs": closed({"server": _TEXT, "path": _ABSOLUTE, "readOnly": _FLAG}, "server", "path"),
    "persistentVolumeClaim": closed({"claimName": NAME, "readOnly": _FLAG}, "claimName"),
    "projected": closed({"sources": listed(_SOURCE), "defaultMode": _MODE}, "sources"),
    "secret": closed({**_files("secretName"), "defaultMode": _MODE}, "secretName"),
}
_KINDS["iscsi"]["dependencies"] = {key: ["secretRef"] for key in ("chapAuthDiscovery", "chapAuthSession")}
# Exactly two properties: the name and one kind.
_VOLUME: Schema = {**closed({"name": LABEL_NAME, **_KINDS}, "name"), "minProperties": 2, "maxProperties": 2}
_MOUNT: Schema = closed(
    {
        "name": {"type": "string"},
        "mountPath": {**_ABSOLUTE, "minLength": 2},
        "subPath": _RELATIVE,
        "subPathExpr": _RELATIVE,
        "readOnly": {"type": "boolean"},
        "recursiveReadOnly": {"enum": ["Disabled", "IfPossible", "Enabled"]},
        "mountPropagation": {"enum": ["None", "HostToContainer"]},
    },
    "name",
    "mountPath",
)
_MOUNT["not"] = {"required": ["subPath", "subPathExpr"]}
# Recursive read-only needs a mount that is read-only, and no mount propagation.
_MOUNT["if"] = {
    "properties": {"recursiveReadOnly": {"enum": ["IfPossible", "Enabled"]}},
    "required": ["recursiveReadOnly"],
}
_MOUNT["then"] = {
    "properties": {"readOnly": {"const": True}, "mountPropagation": {"const": "None"}},
    "required": ["readOnly"],
}
_PORT_NUMBER: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
# A name with at least one letter, and without two adjacent hyphens.
_PORT_NAME: Schema = {"type": "string", "maxLength": 15, "pattern": "^([0-9]+-)*[0-9]*[a-z][a-z0-9]*(-[a-z0-9]+)*$"}
_NUMBER: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}
_SECURITY = closed(
    {
        **dict.fromkeys(("allowPrivilegeEscalation", "privileged", "readOnlyRootFilesystem", "runAsNonRoot"), _FLAG),
        **dict.fromkeys(("runAsUser", "runAsGroup"), _NUMBER),
        "capabilities": closed({"add": _WORDS, "drop": _WORDS}),
        "seccompProfile": closed({"type": {"enum": ["RuntimeDefault", "Unconfined"]}}, "type"),
    }
)
# The chart adds allowPrivilegeEscalation: false, which Kubernetes refuses together with these.
_SECURITY["if"] = {
    "anyOf": [
        {"properties": {"privileged": {"const": True}}, "required": ["privileged"]},
        {
            "properties": {
                "capabilities": {"properties": {"add": {"contains": {"const": "CAP_SYS_ADMIN"}}}, "required": ["add"]}
            },
            "required": ["capabilities"],
        },
    ]
}
_SECURITY["then"] = {
    "properties": {"allowPrivilegeEscalation": {"const": True}},
    "required": ["allowPrivilegeEscalation"],
}
_PLACE = {"anyOf": [_PORT_NUMBER, _PORT_NAME]}
_PROBE: Schema = {
    **closed(
        {
            "exec": closed({"command": {**_WORDS, "minItems": 1}}, "command"),
            "httpGet": closed({"path": _TEXT, "port": _PLACE, "scheme": {"enum": ["HTTP", "HTTPS"]}}, "port"),
            "tcpSocket": closed({"port": _PLACE}, "port"),
            "initialDelaySeconds": _NUMBER,
            **dict.fromkeys(("periodSeconds", "timeoutSeconds", "failureThreshold"), _POSITIVE),
        }
    ),
    "oneOf": [{"required": [way]} for way in ("exec", "httpGet", "tcpSocket")],
}
_CONTAINER: Schema = closed(
    {
        "name": LABEL_NAME,
        "image": {"type": "string", "pattern": "^[!-~]+$"},
        "imagePullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
        "command": _WORDS,
        "args": _WORDS,
        "workingDir": {"type": "string"},
        "env": ref("env"),
        "envFrom": ref("envFrom"),
        "ports": listed(
            closed(
                {"name": _PORT_NAME, "containerPort": _PORT_NUMBER, "protocol": {"enum": ["TCP", "UDP", "SCTP"]}},
                "containerPort",
            )
        ),
        "resources": ref("resources"),
        "restartPolicy": {"const": "Always"},
        "securityContext": ref("security"),
        "startupProbe": ref("probe"),
        "volumeMounts": ref("mounts"),
    },
    "name",
    "image",
)
_CONTAINER["dependencies"] = {"startupProbe": ["restartPolicy"]}
_SIDECAR: Schema = closed(
    {name: value for name, value in _CONTAINER["properties"].items() if name != "restartPolicy"}
    | {"livenessProbe": ref("probe"), "readinessProbe": ref("probe")},
    "name",
    "image",
)

_PORT = closed(
    {
        "port": {"anyOf": [_PORT_NUMBER, _PORT_NAME]},
        "endPort": _PORT_NUMBER,
        "protocol": {"enum": ["TCP", "UDP", "SCTP"]},
    }
)
_PORT["dependencies"] = {"endPort": {"required": ["port"], "properties": {"port": {"type": "integer"}}}}
_PEER: Schema = {
    **closed(
        {
            "namespaceSelector": SELECTOR,
            "podSelector": SELECTOR,
            "ipBlock": closed({"cidr": CIDR, "except": {"type": "array", "items": CIDR}}, "cidr"),
        }
    ),
    "minProperties": 1,
    # A block of addresses allows no other field.
    "dependencies": {"ipBlock": {"maxProperties": 1}},
}
# Without `to`, a rule allows every destination; to request this, write 0.0.0.0/0 and ::/0.
EGRESS: Schema = closed({"to": listed(_PEER), "ports": listed(_PORT)}, "to")

DEFINITIONS: dict[str, Schema] = {
    "affinity": _AFFINITY,
    "annotations": named({"type": "string", "maxLength": 131_072}),
    "containers": {"type": "array", "items": _CONTAINER},
    "env": {"type": "array", "items": _ENV},
    "envFrom": {"type": "array", "items": _ENV_FROM},
    "labels": named(LABEL_VALUE),
    "mounts": {"type": "array", "items": _MOUNT},
    "peers": {"type": "array", "items": _PEER},
    "selector": _SELECTOR,
    "probe": _PROBE,
    "security": _SECURITY,
    "sidecars": {"type": "array", "items": _SIDECAR},
    "spread": {"type": "array", "items": _SPREAD},
    "tolerations": {"type": "array", "items": _TOLERATION},
    "volumes": {"type": "array", "items": _VOLUME},
}
