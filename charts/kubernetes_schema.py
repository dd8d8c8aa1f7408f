"""Schemas of the parts of Kubernetes objects that values hold: what the API server refuses is refused before that.

Source: Kubernetes API reference (core/v1 Affinity, Toleration, TopologySpreadConstraint, EnvVar, Volume, Container;
networking.k8s.io/v1 NetworkPolicyPeer).
"""

from charts.kubernetes_names import (
    CIDR,
    KEY,
    LABEL_KEY,
    LABEL_VALUE,
    LABELS,
    NAME,
    PART,
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
    found = closed(
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
    return {**found, "required": ["key", "operator"], "allOf": rules}


_EXPRESSION = _expression(LABEL_KEY, LABEL_VALUE)
_SELECTOR: Schema = closed(
    {"matchLabels": LABELS, "matchExpressions": {"type": "array", "items": _EXPRESSION}},
)

_NODE_EXPRESSION = _expression({"type": "string", "minLength": 1}, {"type": "string"}, "Gt", "Lt")
# An empty term matches no node, and would match some if an expression were added to it.
_NODE_TERM = {
    **closed({"matchExpressions": listed(_NODE_EXPRESSION), "matchFields": listed(_NODE_EXPRESSION)}),
    "minProperties": 1,
}
_POD_TERM = closed(
    {
        "topologyKey": LABEL_KEY,
        "labelSelector": SELECTOR,
        "namespaces": {"type": "array", "items": NAME},
        "namespaceSelector": SELECTOR,
        "matchLabelKeys": {"type": "array", "items": LABEL_KEY},
        "mismatchLabelKeys": {"type": "array", "items": LABEL_KEY},
    },
    "topologyKey",
)
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
            "key": {"type": "string"},
            "operator": {"enum": ["Exists", "Equal"]},
            "value": {"type": "string"},
            "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            "tolerationSeconds": {"type": "integer", "minimum": 0},
        }
    ),
    "dependencies": {"tolerationSeconds": {"properties": {"effect": {"const": "NoExecute"}}, "required": ["effect"]}},
    # `Exists` asks for no value; anything else asks for a key.
    "if": {"properties": {"operator": {"const": "Exists"}}, "required": ["operator"]},
    "then": {"properties": {"value": {"const": ""}}},
    "else": {"required": ["key"]},
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


def _ref(**more: Schema) -> Schema:
    return closed({"name": NAME, "optional": {"type": "boolean"}, **more}, "name", *more)


_VARIABLE: Schema = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"}
_FROM = closed(
    {
        "secretKeyRef": _ref(key=KEY),
        "configMapKeyRef": _ref(key=KEY),
        "fieldRef": closed({"fieldPath": {"type": "string"}, "apiVersion": {"type": "string"}}, "fieldPath"),
        "resourceFieldRef": {"type": "object"},
    }
)
_ENV: Schema = closed(
    {"name": _VARIABLE, "value": {"type": "string"}, "valueFrom": {**_FROM, "minProperties": 1, "maxProperties": 1}},
    "name",
)
_ENV_FROM: Schema = {
    **closed({"secretRef": _ref(), "configMapRef": _ref(), "prefix": {"type": "string"}}),
    "anyOf": [{"required": ["secretRef"]}, {"required": ["configMapRef"]}],
}

_LABEL: Schema = {"type": "string", "maxLength": 63, "pattern": f"^{PART}$"}
_KINDS = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "fc", "hostPath", "image", "iscsi", "nfs",
    "persistentVolumeClaim", "projected", "secret",
)  # fmt: skip
# A name and a kind; what a kind has is left to Kubernetes, whose versions differ.
_VOLUME: Schema = {
    **closed({"name": _LABEL, **{kind: {"type": "object"} for kind in _KINDS}}, "name"),
    "minProperties": 2,
    "maxProperties": 2,
}
_MOUNT: Schema = closed(
    {
        "name": {"type": "string"},
        "mountPath": {"type": "string", "pattern": "^/[^:]+$"},
        "subPath": {"type": "string"},
        "subPathExpr": {"type": "string"},
        "readOnly": {"type": "boolean"},
        "recursiveReadOnly": {"enum": ["Disabled", "IfPossible", "Enabled"]},
        "mountPropagation": {"enum": ["None", "HostToContainer"]},
    },
    "name",
    "mountPath",
)
_WORDS: Schema = {"type": "array", "items": {"type": "string"}}
_OPEN: Schema = {"type": "object"}
_CONTAINER: Schema = closed(
    {
        "name": _LABEL,
        "image": {"type": "string", "minLength": 1},
        "imagePullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
        "command": _WORDS,
        "args": _WORDS,
        "workingDir": {"type": "string"},
        "env": ref("env"),
        "envFrom": ref("envFrom"),
        "ports": {"type": "array", "items": _OPEN},
        "resources": _OPEN,
        "restartPolicy": {"const": "Always"},
        "securityContext": _OPEN,
        "startupProbe": _OPEN,
        "volumeMounts": ref("mounts"),
    },
    "name",
    "image",
)

_PORT = closed(
    {
        "port": {"type": ["integer", "string"]},
        "endPort": {"type": "integer", "minimum": 1, "maximum": 65535},
        "protocol": {"enum": ["TCP", "UDP", "SCTP"]},
    }
)
_PEER: Schema = {
    **closed(
        {
            "namespaceSelector": SELECTOR,
            "podSelector": SELECTOR,
            "ipBlock": closed({"cidr": CIDR, "except": {"type": "array", "items": CIDR}}, "cidr"),
        }
    ),
    "minProperties": 1,
}
# Without `to` a rule is open to every destination; who wants that says so by 0.0.0.0/0 and ::/0.
EGRESS: Schema = closed({"to": listed(_PEER), "ports": listed(_PORT)}, "to")

DEFINITIONS: dict[str, Schema] = {
    "affinity": _AFFINITY,
    "annotations": named({"type": "string"}),
    "containers": {"type": "array", "items": _CONTAINER},
    "env": {"type": "array", "items": _ENV},
    "envFrom": {"type": "array", "items": _ENV_FROM},
    "labels": named(LABEL_VALUE),
    "mounts": {"type": "array", "items": _MOUNT},
    "peers": {"type": "array", "items": _PEER},
    "selector": _SELECTOR,
    "spread": {"type": "array", "items": _SPREAD},
    "tolerations": {"type": "array", "items": _TOLERATION},
    "volumes": {"type": "array", "items": _VOLUME},
}
