"""JSON Schemas of Kubernetes names, keys and labels, and functions that build such schemas.

Sources: RFC 1123 subdomains; label keys of 63 characters below an optional prefix.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def closed(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these keys and no others."""
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return {**schema, "required": list(required)} if required else schema


def listed(item: Schema) -> Schema:
    """A list of at least one `item`; Kubernetes gives an empty list another meaning, mostly 'all'."""
    return {"type": "array", "minItems": 1, "items": item}


def ref(name: str) -> Schema:
    """A reference to an entry of `DEFINITIONS`, which a document contains only once."""
    return {"$ref": f"#/definitions/{name}"}


PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
# The digits of an amount that is not 0.
MORE_THAN_0 = r"([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.[0-9]*[1-9][0-9]*)"
_SUBDOMAIN = rf"{PART}(\.{PART})*"
_WORD = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"

NAME: Schema = {"type": "string", "maxLength": 253, "pattern": f"^{_SUBDOMAIN}$"}
OPTIONAL_NAME: Schema = {"type": "string", "maxLength": 253, "pattern": f"^({_SUBDOMAIN})?$"}
# A name that also becomes the value of a label.
OPTIONAL_LABEL_NAME: Schema = {**OPTIONAL_NAME, "maxLength": 63}
# The name of a namespace, a port or a volume: one part of a subdomain.
LABEL_NAME: Schema = {"type": "string", "maxLength": 63, "pattern": f"^{PART}$"}
KEY: Schema = {"type": "string", "maxLength": 253, "pattern": r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]*$"}
_LONG: Schema = {"pattern": "^[^/]{254}"}  # before the slash
LABEL_KEY: Schema = {"type": "string", "pattern": f"^({_SUBDOMAIN}/)?{_WORD}$", "not": _LONG}
LABEL_VALUE: Schema = {"type": "string", "pattern": f"^({_WORD})?$"}


def named(value: Schema) -> Schema:
    """A mapping from label keys to `value`; keys are patterns, so that a message locates a wrong key."""
    keys = {"patternProperties": {LABEL_KEY["pattern"]: value}, "propertyNames": {"not": _LONG}}
    return {"type": "object", "additionalProperties": False, **keys}


LABELS, ANNOTATIONS, SELECTOR = ref("labels"), ref("annotations"), ref("selector")

# The templates check the numbers, with messages in words: nobody could read a pattern for all of IPv6.
CIDR: Schema = {"type": "string", "pattern": "^[0-9a-fA-F.:]+/(0|[1-9][0-9]{0,2})$"}
