"""Reading what an engine requires from a manifest that somebody else may have written."""

from dataclasses import fields
from typing import Any

from enginery.core import parsing
from enginery.core.codec import decode
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.core.requirements import KINDS, Requirement, Unknown


def read_requirement(value: Any, path: str) -> Requirement:
    """A requirement that `core.requirements.to_json` wrote. One of a kind, or with a field, that this enginery does not
    know rules out its engine alone. Raises Malformed for a field of another type."""
    data = parsing.mapping(value, path)
    kind = parsing.field(data, "kind", parsing.text, path)
    known = KINDS.get(kind)
    if known is None or data.keys() != {field.name for field in fields(known)}:
        return Unknown(kind, canonical_json(data).decode())
    try:
        return decode(data, known)
    except IntegrityError as error:
        raise Malformed(f"{path}: {error}") from error
