"""Schemas of what Kubernetes calls things: names, keys, labels. And the words that schemas are made of.

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
    """A list with at least one such item: an empty one means something else to Kubernetes, mostly 'all'."""
    return {"type": "array", "minItems": 1, "items": item}


def ref(name: str) -> Schema:
    """A schema of `DEFINITIONS`, which a document holds once however often it is needed."""
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
# Of a namespace, a port or a volume: one word of a name.
LABEL_NAME: Schema = {"type": "string", "maxLength": 63, "pattern": f"^{PART}$"}
KEY: Schema = {"type": "string", "maxLength": 253, "pattern": r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]*$"}
_LONG: Schema = {"pattern": "^[^/]{254}"}  # before the slash
LABEL_KEY: Schema = {"type": "string", "pattern": f"^({_SUBDOMAIN}/)?{_WORD}$", "not": _LONG}
LABEL_VALUE: Schema = {"type": "string", "pattern": f"^({_WORD})?$"}


def named(value: Schema) -> Schema:
    """A mapping by label keys. As patterns of keys, so that a message says where a wrong one is."""
    keys = {"patternProperties": {LABEL_KEY["pattern"]: value}, "propertyNames": {"not": _LONG}}
    return {"type": "object", "additionalProperties": False, **keys}


LABELS, ANNOTATIONS, SELECTOR = ref("labels"), ref("annotations"), ref("selector")

# What the numbers are is for the templates to say, in words: a pattern for all of IPv6 says nothing to its reader.
CIDR: Schema = {"type": "string", "pattern": "^[0-9a-fA-F.:]+/(0|[1-9][0-9]{0,2})$"}
