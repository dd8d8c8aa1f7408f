"""Engines as OCI images: a layout on disk that any registry tool can push, and Kubernetes can mount as a volume.

Each engine becomes its own image: one layer, a tar with the engine and the JSON that `pull` writes beside it. One index
per version lists all images. Compute capability, precision and backend are annotations, because a platform contains
only operating system and CPU. The same engines give the same bytes. A KServe model car is an image with a Triton
repository of the engine in `/models`.

Sources: OCI image spec 1.0.2 (layout, index, manifest, config, annotations). Layers are plain tars, and the config is
an image's, because container runtimes mount nothing else.
"""

import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enginesmith.client.layouts.triton import Triton
from enginesmith.client.layouts.triton_config import REMEDY, find_unservable
from enginesmith.client.pull import BlobFetcher, describe, stem_of
from enginesmith.client.resolve import EngineCandidate, EngineRanking, Policy
from enginesmith.core.codec import Excerpt, decode, encode, parse_as
from enginesmith.core.errors import InputError, UnknownNameError, canonical_json, digest_of_bytes, digest_of_file
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import JsonObject
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest, require_model
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import make_folder, reachable, start_atomic_write, sweep, write_whole
from enginesmith.registry.trust import require
from enginesmith.registry.trust.policy import TrustPolicy
from enginesmith.registry.versions.lookup import Located

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
REF_NAME = "org.opencontainers.image.ref.name"
PREFIX = "io.enginesmith."
# Where KServe looks for the model in an image (kserve, pkg/utils/storage.go).
CAR = "models"
MAX_INDEX_BYTES = 16 << 20
LAYOUT = canonical_json({"imageLayoutVersion": "1.0.0"})

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64", "amd64": "amd64"}
Json = dict[str, object]


def export_oci(
    store: Store,
    located: Located,
    dest: Path,
    *,
    proven_only: bool = False,
    triton: bool = False,
    trust: TrustPolicy | Path | str | None = None,
) -> tuple[str, ...]:
    """Write the usable engines of a version to the OCI layout in the folder `dest`; its other images stay. Returns the
    layout's tags of the version (the first) and of each engine.

    triton: each image has a Triton repository in `/models`, and engines that Triton cannot serve are left out.
    Raises UnknownNameError if no engine is usable, InputError for a folder with other files, IntegrityError for a
    damaged engine, UnavailableError for a disk, UntrustedError if the trust policy requires more.
    """
    manifest = located.manifest
    require_model(manifest)
    # Mounting an image checks nothing, so the trust policy is checked here.
    is_counted = require(store, located.manifest, trust).counts
    is_proven_only = proven_only or located.proven_only
    entries: list[EngineEntry] = [
        unit
        for unit in judge_entries(store, manifest, is_counted)
        if unit.status == "proven" or (unit.usable and not is_proven_only)
    ]
    if not entries:
        engine_kind = "proven" if is_proven_only else "usable"
        raise UnknownNameError(f"{manifest.reference} has no {engine_kind} engine; `enginesmith show` says why")
    if triton:
        reasons = {entry.unit: find_unservable(entry) for entry in entries}
        if all(reasons.values()):
            reason_lines = [f"  {unit}: {reason}" for unit, reason in reasons.items()]
            problem = f"{manifest.reference} has no engine that Triton can serve; {REMEDY}:"
            raise UnknownNameError("\n".join([problem, *reason_lines]))
        entries = [entry for entry in entries if not reasons[entry.unit]]
    old_images = _read_index(dest)
    layout, suffix = _Layout(dest), "-triton" if triton else ""
    # Without the channel, so that every channel gives the same image.
    exported_version = Located(located.reference, manifest)
    images = [_image(store, layout, exported_version, entry, triton) for entry in entries]
    annotations = _version_annotations(manifest)
    listing = {"schemaVersion": 2, "mediaType": INDEX, "manifests": images, "annotations": annotations}
    descriptor = {**layout.put(canonical_json(listing), INDEX), "annotations": annotations}
    tags = {f"{manifest.model}-{manifest.version}{suffix}": descriptor}
    tags |= {
        f"{stem_of(manifest, entry)}-{entry.backend}{suffix}": image
        for entry, image in zip(entries, images, strict=True)
    }
    for old in map(_annotations, old_images):  # 'a-1' version 2 and 'a' version '1-2' have the same tag
        owner = old.get(f"{PREFIX}model"), old.get(f"{PREFIX}version")
        if old.get(REF_NAME) in tags and owner != (manifest.model, manifest.version):
            raise InputError(f"{dest}: the tag {old[REF_NAME]} belongs to {owner[0]}@{owner[1]}; name another folder")
    write_whole(dest / "oci-layout", LAYOUT)
    other_images = [image for image in old_images if _annotations(image).get(REF_NAME) not in tags]
    new_manifests = [{**image, "annotations": {**_annotations(image), REF_NAME: name}} for name, image in tags.items()]
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*other_images, *new_manifests]}
    write_whole(dest / "index.json", canonical_json(index))
    return tuple(tags)


def _engine_annotations(manifest: Manifest, entry: EngineEntry) -> dict[str, str]:
    """The annotations, name -> string, by which an engine's image can be chosen."""
    capability = entry.compute_capability
    annotations = {
        "target": entry.target,
        "compute-capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "product": entry.product,
        "precision": entry.precision,
        "backend": entry.backend,
        "status": entry.status,
        "requires": canonical_json([encode(requirement) for requirement in entry.requires]).decode(),
        "toolchain": ", ".join(f"{name} {version}" for name, version in sorted(entry.toolchain.items())) or None,
        "engine": f"sha256:{entry.digest}",
        "engine-bytes": str(manifest.size_of(entry)),
        "report": f"sha256:{entry.report}",
    }
    return {
        **_version_annotations(manifest),
        **{f"{PREFIX}{key}": value for key, value in annotations.items() if value},
    }


def _image(store: Store, layout: "_Layout", located: Located, entry: EngineEntry, triton: bool) -> Json:
    """Write one engine's layer, config and manifest; return the image's descriptor for an index."""
    manifest = located.manifest

    def lay_out(folder: Path) -> None:
        if not triton:
            stem = stem_of(manifest, entry)
            description_bytes = canonical_json(describe(located, entry, f"{stem}{entry.suffix}"))
            shards = manifest.shards.get(str(entry.digest), {})
            for name, digest in ((f"{stem}{entry.suffix}", str(entry.digest)), *((shard, shard) for shard in shards)):
                store.fetch(digest, folder / name)
            (folder / f"{stem}.json").write_bytes(description_bytes)
            return
        candidates = (EngineCandidate(entry, "named"),)
        ranking = EngineRanking(manifest.reference, Machine(entry.compute_capability), Policy(), candidates, ())
        Triton().at(folder / CAR, manifest.model).swap(store, located, [ranking], BlobFetcher(), keep=1)

    layer = layout.put_layer(lay_out)
    annotations = _engine_annotations(manifest, entry)
    # The building machine's architecture: engines contain code for its kind of CPU, or its libraries load them.
    architecture = _ARCHITECTURES.get(str(manifest.host.get("machine", "")).lower(), "amd64")
    platform = {"architecture": architecture, "os": "linux"}
    config = {
        **platform,
        "created": manifest.created_at,
        "config": {"Labels": annotations},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": layout.put(canonical_json(config), CONFIG),
        "layers": [layer],
        "annotations": annotations,
    }
    return {**layout.put(canonical_json(document), MANIFEST), "platform": platform, "annotations": annotations}


@dataclass(frozen=True)
class _Layout:
    """The folder of a layout, into which blobs are written."""

    root: Path

    def put(self, data: bytes, media_type: str) -> Json:
        """Write a document; returns its descriptor."""
        digest = digest_of_bytes(data)
        write_whole(self._blobs() / digest, data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def put_layer(self, lay_out: Callable[[Path], None]) -> Json:
        """Write the tar of the files that `lay_out` writes to a folder; return its descriptor. Raises as `lay_out`."""
        folder = self._blobs()
        with reachable(f"writing {folder}"):
            sweep(folder)
            with tempfile.TemporaryDirectory(dir=self.root) as temp_folder, start_atomic_write(folder) as file:
                copies_folder = Path(temp_folder)
                lay_out(copies_folder)
                with tarfile.open(fileobj=file.stream, mode="w", format=tarfile.PAX_FORMAT) as tar_file:
                    for path in sorted(path for path in copies_folder.rglob("*") if path.is_file()):
                        with path.open("rb") as stream:
                            # A TarInfo has neither times nor owners, so that equal files give equal bytes.
                            member = tarfile.TarInfo(path.relative_to(copies_folder).as_posix())
                            member.size, member.mode = path.stat().st_size, 0o444
                            tar_file.addfile(member, stream)
                file.stream.flush()
                digest, size = digest_of_file(file.path), file.stream.tell()
                file.commit(folder / digest)
        return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size}

    def _blobs(self) -> Path:
        folder = self.root / "blobs" / "sha256"
        with reachable(f"making {folder}"):
            make_folder(folder)
        return folder


@dataclass(frozen=True)
class _Index(Excerpt):
    manifests: tuple[JsonObject, ...]


def _read_index(dest: Path) -> list[Json]:
    """The descriptors in the index of the layout at `dest`. Raises InputError for a folder that is no layout."""
    with reachable(f"reading {dest}"):
        if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
            return []
        if not dest.is_dir() or not (dest / "oci-layout").is_file() or not (dest / "index.json").is_file():
            if dest.is_dir() and (dest / "blobs" / "sha256").is_dir() and not (dest / "index.json").exists():
                return []  # from an export that was killed
            raise InputError(
                f"{dest} is not an OCI layout; name a new folder, or one that `enginesmith registry export` wrote"
            )
        index_bytes = (dest / "index.json").read_bytes()
    try:
        descriptors: list[Json] = [
            {**descriptor} for descriptor in parse_as(index_bytes, MAX_INDEX_BYTES, _Index).manifests
        ]
        for descriptor in descriptors:
            _annotations(descriptor)
    except Malformed as error:
        raise InputError(f"{dest / 'index.json'} is damaged ({error}); name a new folder") from error
    return descriptors


def _annotations(descriptor: Json) -> dict[str, object]:
    return decode(descriptor.get("annotations") or {}, dict[str, object], "annotations")


def _version_annotations(manifest: Manifest) -> dict[str, str]:
    """The annotations of a version: ours and those that the OCI image spec defines."""
    return {
        f"{PREFIX}model": manifest.model,
        f"{PREFIX}version": manifest.version,
        f"{PREFIX}manifest": f"sha256:{manifest.digest}",
        "org.opencontainers.image.title": manifest.model,
        "org.opencontainers.image.version": manifest.version,
        "org.opencontainers.image.created": manifest.created_at,
    }
