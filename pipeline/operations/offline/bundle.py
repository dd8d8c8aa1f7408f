"""A version's engines and golden cases in a folder, for a GPU machine with torch, numpy and onnx and nothing else."""

from collections.abc import Collection
from pathlib import Path

from enginery.core.errors import InputError, UnknownNameError
from enginery.registry.build_request import request_of
from enginery.registry.evidence.attestations import judge_entries
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from pipeline.compile.jobs.blobs import fetch
from validation.golden.golden_set import GoldenSet
from validation.gpu.cases import save_cases
from validation.gpu.offline_bundle import BundledEngine, OfflineBundle


def write_offline_bundle(
    store: Store, manifest: Manifest, folder: Path, targets: Collection[str] | None = None
) -> OfflineBundle:
    """Write the folder that `python -m validation.gpu --carry` takes; see `validation.gpu.offline_bundle`.

    targets: names of the targets to keep to; None for all. Raises InputError for a folder that holds something, and for
    engines without weights of their own, UnknownNameError where no engine is left, IntegrityError for a damaged blob.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a folder that is, or that is not there yet")
    chosen = [
        entry
        for entry in judge_entries(store, manifest)
        if entry.digest is not None and (targets is None or entry.target in targets)
    ]
    if not chosen:
        raise UnknownNameError(
            f"{manifest.model}@{manifest.version} has no engine to carry{' for that target' if targets else ''}; "
            f"`enginery show {manifest.model}@{manifest.version}` lists what it has"
        )
    if stripped := [entry.unit for entry in chosen if entry.is_stripped]:
        raise InputError(
            f"{', '.join(stripped)}: without weights of its own, which it takes from the registry; "
            "prove it on a node that reaches that, or carry other targets"
        )
    place = folder / "engines"
    place.mkdir(parents=True)
    engines = {}
    for entry in chosen:
        digest = str(entry.digest)
        path = fetch(store, digest, place / f"{digest}{entry.suffix or ''}")
        engines[digest] = BundledEngine(digest, request_of(entry), path)
    digest = manifest.golden
    golden = fetch(store, digest, folder / "golden.safetensors")
    save_cases(GoldenSet.load(golden), digest, folder)
    golden.unlink()
    made = OfflineBundle(manifest.model, manifest.version, manifest.digest, digest, tuple(engines.values()), folder)
    made.save()
    return made
