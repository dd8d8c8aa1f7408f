"""Pointers: for each channel one short document that says where it leads, and with which snapshot; clients follow it.

The channel's own document stays the truth: moves are decided there, by compare-and-swap. It has the whole history and
grows; the pointer has the last move only, so that fifty thousand nodes may read it after every move. A pointer is made
from the channel and the version's documents alone, and may be deleted: clients then read the channel, as they do where
a registry has no pointers.

Who moves a channel marks the pointer first (`moving`), moves the channel, and writes the pointer anew (`refresh`). A
client that finds a marked pointer reads the channel itself. So a writer that is killed in between leaves a pointer that
costs more requests, and none that leads to where the channel leads no longer.

While a rollout runs, its pointer also says which version it brings, and to whom (`rollouts.waves`): the same one
document, so that a wave costs nodes nothing more. Such a pointer has format 2, which clients that know no rollouts
refuse; that of a channel that never had a rollout has format 1.
"""

from dataclasses import dataclass, field, replace

from enginery.core import parsing
from enginery.core.codec import OMIT_DEFAULT, OMIT_NONE, encode
from enginery.core.digest import canonical_json, is_digest
from enginery.core.errors import InputError, IntegrityError
from enginery.core.names import is_name
from enginery.core.parsing import Malformed
from enginery.registry.rollouts.waves import WHOLE, ServingNode, Slice, is_reached
from enginery.registry.store.base import Documents
from enginery.registry.store.layout import FORMAT as REGISTRY_FORMAT
from enginery.registry.store.layout import pointer_key

# Of the pointer of a channel that has had a rollout, and of another.
FORMAT, PLAIN_FORMAT = 2, 1
MAX_BYTES = 64 << 10


@dataclass(frozen=True)
class PointedVersion:
    """The version that a channel serves. manifest: its digest.  at: time of the move (ISO 8601, UTC).

    snapshot: digest of the blob with the version's documents (`snapshots`); None where it has none, and clients read
    the documents one by one.
    """

    version: str
    manifest: str
    at: str
    proven_only: bool = False
    snapshot: str | None = None


@dataclass(frozen=True)
class PointedRollout:
    """A rollout, for nodes. id: its id.  candidate: the version that it brings.  reach: to whom, by now.

    reporters_ppm: parts per million of the nodes that report what they serve.
    """

    id: str
    candidate: PointedVersion
    reach: tuple[Slice, ...]
    reporters_ppm: int = WHOLE


@dataclass(frozen=True)
class Pointer:
    """Where a channel leads. moves: how many moves the channel has had.  serves: None for a channel that never had one.

    moving: a token of the writer that is moving the channel; the channel's own document then says where it leads.
    rollout: the one that runs, None for none.  revision: of the document of the channel's rollouts.
    registry: the format of the registry, so that who reads a pointer needs no marker.
    """

    model: str
    channel: str
    moves: int
    serves: PointedVersion | None
    moving: str | None = field(default=None, metadata=OMIT_NONE)
    registry: int = REGISTRY_FORMAT
    format: int = PLAIN_FORMAT
    rollout: PointedRollout | None = field(default=None, metadata=OMIT_NONE)
    revision: int = field(default=0, metadata=OMIT_DEFAULT)

    @property
    def order(self) -> tuple[int, int]:
        """Of two pointers of a channel the newer has the greater one."""
        return self.moves, self.revision

    @property
    def settled(self) -> PointedVersion | None:
        """The version that it leads to; None where only the channel itself can say."""
        return None if self.moving else self.serves

    def served_to(self, node: ServingNode | None) -> PointedVersion | None:
        """The version that it leads a node to; None where only the channel itself can say. node: None is one that no
        rollout reaches."""
        found = self.rollout
        if found and node and not self.moving and is_reached(node, found.id, found.reach):
            return found.candidate
        return self.settled

    @property
    def versions(self) -> tuple[PointedVersion, ...]:
        """The versions that it leads nodes to."""
        return tuple(item for item in (self.serves, self.rollout.candidate if self.rollout else None) if item)

    def with_rollout(self, rollout: PointedRollout | None, revision: int) -> "Pointer":
        """The pointer with this rollout, in the format that this takes."""
        return replace(self, rollout=rollout, revision=revision, format=FORMAT if revision else PLAIN_FORMAT)

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        return canonical_json(encode(self))


def read_pointer(store: Documents, model: str, channel: str) -> Pointer | None:
    """The pointer of a channel; None where there is none. Raises as `parse_pointer`."""
    return parse_pointer(store.read(pointer_key(model, channel)), model, channel)


def parse_pointer(data: bytes | None, model: str, channel: str) -> Pointer | None:
    """A pointer from its document's bytes; None for no document.

    Raises IntegrityError for a damaged one, InputError for one of a newer format, or of a newer registry.
    """
    if data is None:
        return None
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        refuse_newer(document, f"pointer {model}:{channel}")
        found = parsing.parse_as(data, MAX_BYTES, Pointer)
        if (found.model, found.channel) != (model, channel):
            raise Malformed(f"is that of {found.model}:{found.channel}: it was moved by hand")
        check_pointed(found)
    except IntegrityError as error:
        raise IntegrityError(
            f"pointer {model}:{channel}: {error}; `enginery verify --repair` writes it anew"
        ) from error
    return found


def refuse_newer(document: dict[str, object], what: str, newest: int = FORMAT) -> None:
    """Raise InputError for a document of a newer format than `newest`, or of a registry of a newer one."""
    for name, known in (("format", newest), ("registry", REGISTRY_FORMAT)):
        if (found := parsing.field(document, name, parsing.count)) > known:
            where = "" if name == "format" else " of its registry"
            raise InputError(f"{what} has format {found}{where}; this enginery reads {known}: upgrade enginery")


def check_pointed(pointer: Pointer) -> None:
    """Raise Malformed for names and digests that are none."""
    for served in pointer.versions:
        if not is_name(served.version):
            raise Malformed(f"the version is {served.version[:80]!r}, which is no name")
        for digest in (served.manifest, *([served.snapshot] if served.snapshot is not None else [])):
            if not is_digest(digest):
                raise Malformed(f"{digest[:80]!r} is not a digest")
    if pointer.format != (FORMAT if pointer.rollout or pointer.revision else PLAIN_FORMAT):
        raise Malformed(f"format is {pointer.format}, which is not that of its fields")
