"""Attachments: files that were added to a version after it was published, such as a compile cache of its model.

The file is a blob. A document beside the manifest names it by digest, and lists the machines that it fits. The document
is written once and never changed; if two have the same name, the newer one counts. It names the manifest's digest, so
that its signature is not valid for another version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Len, Predicate, doc

from enginesmith.core.codec import encode, explain_damage, parse_as
from enginesmith.core.errors import Digest, canonical_json, digest_of_bytes
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Format, Requirement
from enginesmith.registry.manifest import BlobSize, Manifest, Number
from enginesmith.registry.store.base import Documents
from enginesmith.registry.store.layout import attachment_key, evidence_prefix, is_key

FORMAT = 1
MAX_BYTES = 1 << 20
# The suffix of the copy of a document that `pull` writes beside the file.
DESCRIPTION = ".attachment.json"
COMPILE_CACHE = "torch-compile-cache"
# Kinds of files that are executed as code. Pulling them needs a signature, unless the user waives it.
CODE_KINDS = frozenset({COMPILE_CACHE})


def is_attachment_name(text: str) -> bool:
    """Whether an attachment may have this name: a file name that is not the name of a description."""
    return is_key(text) and "/" not in text and not text.endswith(DESCRIPTION)


_FileName = Annotated[
    str, Predicate(is_attachment_name), doc(f"a file name of letters, digits, '.', '_', '-', not ending {DESCRIPTION}")
]
_Text = Annotated[str, Len(0, 1000), doc("at most 1000 characters")]


@dataclass(frozen=True)
class Attachment:
    """A file of a version. name: of the file.  kind: the file's use; 'torch-compile-cache' is used by `warm_start`.

    manifest: digest of the version's manifest.  digest, size_bytes: of the file.  requires: requirements on a machine
    that uses it.  note: for people.  measured: measurements of it; the names contain the units.
    by: who attached it. created_at: ISO 8601, UTC.
    """

    name: _FileName
    kind: Name
    model: Name
    version: Name
    manifest: Digest
    digest: Digest
    size_bytes: BlobSize
    by: _Text
    created_at: _Text
    requires: tuple[Requirement, ...] = ()
    note: _Text = ""
    measured: Mapping[str, Number] = field(default_factory=dict)
    format: Annotated[int, Format(FORMAT)] = FORMAT

    @property
    def is_code(self) -> bool:
        """Whether using the file executes code from it."""
        return self.kind in CODE_KINDS

    def says_same(self, other: "Attachment") -> bool:
        """Whether this differs from another attachment only in who attached it, and when."""
        return replace(self, by=other.by, created_at=other.created_at) == other

    def to_bytes(self) -> bytes:
        """The document. Raises Malformed for an invalid field."""
        document = canonical_json(encode(self))
        read_attachment(document)
        return document

    def key(self) -> str:
        """The document's key in a registry."""
        return attachment_key(self.model, self.version, self.digest, digest_of_bytes(self.to_bytes()))


def read_attachment(data: bytes) -> Attachment:
    """Parse the document of an attachment. Raises Malformed."""
    return parse_as(data, MAX_BYTES, Attachment)


def attachments(store: Documents, manifest: Manifest) -> list[tuple[Attachment, bytes]]:
    """The attachments of a version with their documents, newest first. Raises IntegrityError for a damaged one."""
    documents = []
    for key in store.list(evidence_prefix("attachments", manifest.model, manifest.version)):
        attachment_bytes = store.read(key) or b""
        remedy = "delete it, and attach its file again (`enginesmith registry attach`)"
        with explain_damage(f"{key} of {store.uri}", remedy):
            attachment = read_attachment(attachment_bytes)
            if attachment.key() != key or attachment.manifest != manifest.digest:
                raise Malformed("it does not match its path or the manifest: it was edited by hand, moved or damaged")
        documents.append((attachment, attachment_bytes))
    return sorted(documents, key=lambda document: (document[0].created_at, document[0].digest), reverse=True)
