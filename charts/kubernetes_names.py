"""Schemas of what Kubernetes calls things: names, keys, labels. And the words that schemas are made of.

Sources: RFC 1123 subdomains; label keys of 63 characters below an optional prefix.
"""

from collections.abc import Mapping
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


PART = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = rf"{PART}(\.{PART})*"
_WORD = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"

# Templates write names without quotes, and YAML reads these as numbers and truth values.
TEXT: Schema = {
    "type": "string",
    "not": {"pattern": "^([0-9][0-9._]*(e[0-9]+)?|0[xob][0-9a-f_]+|true|false|yes|no|on|off|y|n|null)$"},
}
NAME: Schema = {**TEXT, "maxLength": 253, "pattern": f"^{_SUBDOMAIN}$"}
OPTIONAL_NAME: Schema = {**TEXT, "maxLength": 253, "pattern": f"^({_SUBDOMAIN})?$"}
# A name that also becomes the value of a label.
OPTIONAL_LABEL_NAME: Schema = {**OPTIONAL_NAME, "maxLength": 63}
KEY: Schema = {**TEXT, "maxLength": 253, "pattern": r"^\.?[A-Za-z0-9_-][A-Za-z0-9._-]*$"}
LABEL_KEY: Schema = {"type": "string", "pattern": f"^({_SUBDOMAIN}/)?{_WORD}$"}
LABEL_VALUE: Schema = {"type": "string", "pattern": f"^({_WORD})?$"}


def named(value: Schema) -> Schema:
    """A mapping by label keys. As patterns of keys, so that a message says where a wrong one is."""
    return {"type": "object", "patternProperties": {LABEL_KEY["pattern"]: value}, "additionalProperties": False}


LABELS, ANNOTATIONS, SELECTOR = ref("labels"), ref("annotations"), ref("selector")

# What the numbers are is for the templates to say, in words: a pattern for all of IPv6 says nothing to its reader.
CIDR: Schema = {"type": "string", "pattern": "^[0-9a-fA-F.:]+/(0|[1-9][0-9]{0,2})$"}
