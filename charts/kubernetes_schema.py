"""Schemas of the parts of Kubernetes objects that values hold: what the API server refuses is refused before that.

Sources: Kubernetes API reference (core/v1 Affinity, Toleration, EnvVar, TopologySpreadConstraint, networking.k8s.io/v1
NetworkPolicyPeer), and its rules for names: RFC 1123 subdomains, label keys of 63 characters below an optional prefix.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]


def closed(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these keys and no others."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return {**found, "required": list(required)} if required else found


def listed(item: Schema) -> Schema:
    """A list with at least one such item: an empty one means something else to Kubernetes, mostly 'all'."""
    return {"type": "array", "minItems": 1, "items": item}


def ref(name: str) -> Schema:
    """A schema of `DEFINITIONS`, which a document holds once however often it is needed."""
    return {"$ref": f"#/definitions/{name}"}


_PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = rf"{_PART}(\.{_PART})*"
_WORD = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"

NAME: Schema = {"type": "string", "maxLength": 253, "pattern": f"^{_SUBDOMAIN}$"}
OPTIONAL_NAME: Schema = {"type": "string", "maxLength": 253, "pattern": f"^({_SUBDOMAIN})?$"}
# A name that also becomes the value of a label.
OPTIONAL_LABEL_NAME: Schema = {**OPTIONAL_NAME, "maxLength": 63}
KEY: Schema = {"type": "string", "maxLength": 253, "pattern": "^[A-Za-z0-9._-]+$"}
LABEL_KEY: Schema = {"type": "string", "pattern": f"^({_SUBDOMAIN}/)?{_WORD}$"}
LABEL_VALUE: Schema = {"type": "string", "pattern": f"^({_WORD})?$"}


def _named(value: Schema) -> Schema:
    """A mapping by label keys. As patterns of keys, so that a message says where a wrong one is."""
    return {"type": "object", "patternProperties": {LABEL_KEY["pattern"]: value}, "additionalProperties": False}


LABELS, ANNOTATIONS, SELECTOR = ref("labels"), ref("annotations"), ref("selector")


def _octets() -> str:
    octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    return rf"({octet}\.){{3}}{octet}/(3[0-2]|[12]?[0-9])"


def _hextets() -> Iterator[str]:
    """The ways to write an IPv6 address: whole, and with `::` after each number of hextets."""
    hextet = "[0-9a-fA-F]{1,4}"
    yield f"({hextet}:){{7}}{hextet}"
    yield f"({hextet}:){{1,7}}:"
    yield from (f"({hextet}:){{1,{before}}}(:{hextet}){{1,{7 - before}}}" for before in range(1, 7))
    yield f":((:{hextet}){{1,7}}|:)"


CIDR: Schema = {
    "type": "string",
    "pattern": f"^({_octets()}|({'|'.join(_hextets())})/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$",
}

_EXPRESSION = closed(
    {
        "key": LABEL_KEY,
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
        "values": {"type": "array", "items": LABEL_VALUE},
    },
    "key",
    "operator",
)
_SELECTOR: Schema = closed(
    {"matchLabels": LABELS, "matchExpressions": {"type": "array", "items": _EXPRESSION}},
)

_NODE_EXPRESSION: Schema = closed(
    {
        "key": {"type": "string", "minLength": 1},
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]},
        "values": {"type": "array", "items": {"type": "string"}},
    },
    "key",
    "operator",
)
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

# Which kinds of volume there are differs between versions of Kubernetes; one has a name and a kind.
_VOLUME: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 63, "pattern": f"^{_PART}$"}},
    "required": ["name"],
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
        "mountPropagation": {"enum": ["None", "HostToContainer", "Bidirectional"]},
    },
    "name",
    "mountPath",
)
_CONTAINER: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 63, "pattern": f"^{_PART}$"},
        "image": {"type": "string", "minLength": 1},
    },
    "required": ["name", "image"],
}

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
    "annotations": _named({"type": "string"}),
    "containers": {"type": "array", "items": _CONTAINER},
    "env": {"type": "array", "items": _ENV},
    "envFrom": {"type": "array", "items": _ENV_FROM},
    "labels": _named(LABEL_VALUE),
    "mounts": {"type": "array", "items": _MOUNT},
    "peers": {"type": "array", "items": _PEER},
    "selector": _SELECTOR,
    "spread": {"type": "array", "items": _SPREAD},
    "tolerations": {"type": "array", "items": _TOLERATION},
    "volumes": {"type": "array", "items": _VOLUME},
}
