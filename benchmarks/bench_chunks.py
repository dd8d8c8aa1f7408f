"""What a layer of content-defined chunks would save: how much of each engine's bytes others hold, too.

    python benchmarks/bench_chunks.py REGISTRY NAME@VERSION [REGISTRY NAME@VERSION ...]

Chunks end where a gear hash over 32 bytes has 16 zero bits: 64 KiB on average, 16 KiB to 256 KiB (the scheme of
FastCDC, Xia et al., USENIX ATC 2016, without its normalisation). Blobs that are equal count as one already.
"""

import sys
import zlib
from itertools import combinations
from pathlib import Path

import numpy as np

from enginesmith.core.errors import digest_of_bytes
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.versions.lookup import locate

SMALLEST, LARGEST = 1 << 14, 1 << 18
GEAR = np.random.default_rng(7).integers(0, 1 << 32, 256, dtype=np.uint64).astype(np.uint32)
Chunks = dict[str, int]


def main() -> None:
    words = sys.argv[1:]
    if len(words) % 2 or not words:
        sys.exit(__doc__)
    engines: dict[str, tuple[str, int, Chunks]] = {}
    for registry, reference in zip(words[::2], words[1::2], strict=True):
        engines |= engines_of(open_store(registry), reference, registry)
    print("| engine | of it is in | bytes shared |\n|---|---|---|")
    for one, other in combinations(engines, 2):
        if one.split()[2] == other.split()[2]:
            has, wanted = engines[one][2], engines[other][2]
            shared = sum(size for digest, size in wanted.items() if digest in has) / sum(wanted.values())
            print(f"| {other} | {one} | {shared:.1%} |")
    blobs = {digest: size for digest, size, _ in engines.values()}
    chunks = {digest: size for _, _, found in engines.values() for digest, size in found.items()}
    print(f"\n{sum(blobs.values()) / 1e6:.1f} MB as {len(blobs)} blobs, {sum(chunks.values()) / 1e6:.1f} MB as chunks")


def engines_of(store: Store, reference: str, where: str) -> dict[str, tuple[str, int, Chunks]]:
    """The GPU engines of a version: 'version target precision registry' -> (digest, bytes, chunks)."""
    manifest = locate(store, parse_reference(reference)).manifest
    found = {}
    for entry in manifest.engines:
        if entry.digest and entry.target != "cpu":
            data = store.read_blob(entry.digest)
            name = f"{reference} {entry.target} {entry.precision} ({Path(where).name})"
            found[name] = (entry.digest, len(data), chunks_of(data))
            packed = len(zlib.compress(data, 1)) / len(data)
            print(
                f"{name}: {len(data) / 1e6:.1f} MB, {len(found[name][2])} chunks, zlib -1 {packed:.0%}", file=sys.stderr
            )
    return found


def chunks_of(data: bytes) -> Chunks:
    """The chunks of some bytes: digest -> size."""
    values = np.frombuffer(data, np.uint8)
    rolled, width = GEAR[values], 1
    while width < 32:
        further = rolled.copy()
        further[width:] += rolled[:-width] << np.uint32(width)
        rolled, width = further, 2 * width
    ends = np.flatnonzero(rolled >> np.uint32(16) == 0) + 1
    found, start = {}, 0
    while start < len(data):
        place = int(np.searchsorted(ends, start + SMALLEST))
        end = min(int(ends[place]) if place < len(ends) else len(data), start + LARGEST, len(data))
        found[digest_of_bytes(data[start:end])] = end - start
        start = end
    return found


if __name__ == "__main__":
    main()
