"""A model package of ONNX Runtime: a version's engines for several execution providers; the runtime picks one.

A folder such as `digits-3.ortpackage/` has manifest.json and a folder for each variant, such as `cpu-fp32/`, with
model.onnx, the shards of its weights, and model.json (the engine's description).

ONNX Runtime uses the first variant of the provider that a session asks for, so a package has one variant for each
provider. A package is written once, whole or not at all; another version has a package with another name. The schema is
that of onnxruntime 1.31 (model_package/README.md in its sources), whose C API reads it.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from enginesmith.client.layouts.base import Placed, SharedFolder
from enginesmith.client.pull import BlobFetcher, Pulled, download_best, download_engine
from enginesmith.client.resolve import EngineRanking, Resolution
from enginesmith.core.errors import InputError, digest_of_bytes
from enginesmith.core.requirements import Library, WideSums
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import make_folder, reachable, sync_folder, write_whole
from enginesmith.registry.versions.lookup import Located

MANIFEST = "manifest.json"
SUFFIX = ".ortpackage"
_MODEL_FILE = "model.onnx"
# The execution provider that runs a backend's engines. The schema's `device` is left out: onnxruntime 1.31.1 finds no
# variant with one for a provider that lists no devices, such as its own CPU provider.
_PROVIDERS = {
    "onnxruntime": "CPUExecutionProvider",
    "onnxruntime-cuda": "CUDAExecutionProvider",
    "onnxruntime-tensorrt": "TensorrtExecutionProvider",
}


@dataclass(frozen=True)
class ModelPackage:
    """A folder that ONNX Runtime opens as a model package."""

    several: ClassVar[bool] = True
    remedy: ClassVar[str] = "build again with `serve: onnxruntime` in its spec"

    def reject(self, entry: EngineEntry) -> str | None:
        """The reason why a package cannot contain this engine; None if it can."""
        if entry.backend not in _PROVIDERS:
            return f"no execution provider of ONNX Runtime opens engines of {entry.backend}"
        if entry.is_stripped:
            return "its file has no weights, and ONNX Runtime does not add them"
        if any(isinstance(requirement, Library) for requirement in entry.requires):
            return "its operators are in a library, which a model package cannot contain"
        if any(isinstance(requirement, WideSums) for requirement in entry.requires):
            return "its int8 sums saturate on CPUs without VNNI, and ONNX Runtime would run it there"
        return None

    def check(self, manifest: Manifest, entries: Sequence[EngineEntry]) -> None:
        """See `Layout`. Rejects two engines of one provider, because ONNX Runtime always takes the first."""
        entries_by_provider: dict[str, EngineEntry] = {}
        for entry in entries:
            earlier_entry = entries_by_provider.setdefault(provider := _PROVIDERS[entry.backend], entry)
            if earlier_entry.digest != entry.digest:
                raise InputError(
                    f"{earlier_entry.unit} and {entry.unit} of {manifest.reference} are both for "
                    f"{provider}; ONNX Runtime takes the first on every machine; pull each into its own package, "
                    "with one --target"
                )

    def at(self, dest: Path, model: str) -> "PackagePlace":
        """The packages of a model in the folder `dest`."""
        return PackagePlace(dest, model, self)


@dataclass(frozen=True)
class PackagePlace(SharedFolder):
    """The packages of a model, one for each version."""

    layout: ModelPackage

    def served(self) -> str:
        """'': no file tells which of the packages a program has open."""
        return ""

    def description(self) -> Path | None:
        """None, like `served`."""
        return None

    def swap(
        self, store: Store, located: Located, rankings: Sequence[EngineRanking], fetcher: BlobFetcher, keep: int
    ) -> Placed:
        """Write the package of a version atomically, or repair damaged files of an existing package.

        Raises as `Place.swap`, and InputError if the version's package has other engines.
        """
        del keep  # every version stays
        manifest = located.manifest
        folder = self.dest / f"{self.model}-{manifest.version}{SUFFIX}"
        staging_folder = folder if folder.is_dir() else self.dest / f".enginesmith-staging-{folder.stem}"
        with reachable(f"writing {folder}"):
            make_folder(staging_folder)
            pulled_engines = [
                download_best(ranking, lambda resolution: _bring(store, located, resolution, staging_folder, fetcher))
                for ranking in rankings
            ]
            self.layout.check(manifest, [engine.engine for engine in pulled_engines])  # the best one may have been lost
            manifest_bytes = _write_manifest(located, pulled_engines)
            if staging_folder == folder:
                if not (folder / MANIFEST).is_file() or (folder / MANIFEST).read_bytes() != manifest_bytes:
                    raise InputError(f"{folder} has other engines; delete it, or give another --dest")
            else:
                for path in staging_folder.iterdir():  # left by a killed process, for other machines
                    if path.name not in {engine.path.parent.name for engine in pulled_engines}:
                        shutil.rmtree(path, ignore_errors=True)
                write_whole(staging_folder / MANIFEST, manifest_bytes)
                staging_folder.rename(folder)
                sync_folder(self.dest)
        placed_engines = tuple(engine.moved_to(folder / engine.path.parent.name) for engine in pulled_engines)
        is_best = not any(engine.resolution.lost for engine in pulled_engines)
        return Placed(
            placed_engines, folder, folder, "", staging_folder != folder, digest_of_bytes(manifest_bytes), is_best
        )


def _bring(store: Store, located: Located, resolution: Resolution, place: Path, fetcher: BlobFetcher) -> Pulled:
    """Download an engine to the folder of its variant."""
    engine = resolution.chosen
    name = f"{engine.target}-{engine.precision}"
    return download_engine(store, located, resolution, place / name, fetcher, file=_MODEL_FILE)


def _write_manifest(located: Located, pulled: Sequence[Pulled]) -> bytes:
    """The package's manifest, which includes its one component."""
    variants: dict[str, object] = {}
    for engine in pulled:
        variants[engine.path.parent.name] = {
            "variant_directory": engine.path.parent.name,
            "ep": _PROVIDERS[engine.engine.backend],
            "executor_info": {"ort": {"model_file": _MODEL_FILE}},
            "additional_metadata": {
                "unit": engine.engine.unit,
                "status": engine.engine.status,
                "sha256": engine.engine.digest,
            },
        }
    manifest = located.manifest
    document = {
        "schema_version": "1.0",
        "package_name": manifest.model,
        "package_version": manifest.version,
        "components": {manifest.model: {"variants": variants}},
        "additional_metadata": {"producer": {"tool": "enginesmith"}},
    }
    return json.dumps(document, indent=1).encode() + b"\n"
