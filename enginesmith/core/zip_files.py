"""Zip files that come from elsewhere: what reading one may raise, and which compression is read.

Python reads bzip2, LZMA and, from 3.14 on, Zstandard too. Each has errors of its own, and nothing here writes them.
"""

import struct
import zipfile
import zlib

# What opening a zip file, or reading a stored or deflated member, raises where it is damaged or of another kind.
DAMAGED = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def check_compression(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile for a member that is neither stored nor deflated."""
    for item in archive.infolist():
        if item.compress_type not in _METHODS:
            raise zipfile.BadZipFile(
                f"{item.filename[:80]!r} is compressed by method {item.compress_type}; only deflate is read"
            )
