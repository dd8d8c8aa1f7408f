"""The marker: the one document that says that a place is a registry, and of which format."""

from builders.digest import canonical_json
from builders.errors import InputError, IntegrityError
from pipeline.registry import parsing
from pipeline.registry.keys import FORMAT, MARKER

MAX_BYTES = 64 << 10
CONTENT = canonical_json({"format": FORMAT})


def check_format(marker: bytes, where: str) -> None:
    """Raise IntegrityError for a marker that cannot be read, InputError for a format this release does not know."""
    try:
        found = parsing.field(parsing.parse_json(marker, MAX_BYTES), "format", parsing.count)
    except parsing.Malformed as error:
        raise IntegrityError(f'{where}/{MARKER} is damaged; it should hold {{"format": {FORMAT}}}') from error
    if found != FORMAT:
        raise InputError(f"registry {where} has format {found}; this enginery reads {FORMAT}: upgrade enginery")
