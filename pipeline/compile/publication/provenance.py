"""Where a version came from, in the words of two standards, so that other tools can ask.

An in-toto Statement (v1) with a SLSA Provenance (v1) predicate, and a CycloneDX 1.6 SBOM of what built it.

Both are blobs whose digests the manifest names, so whoever signs the manifest signs them. They tell of times and hosts,
and are no part of what a version is: the same content built again is the same version, and keeps its first statement.

Formats: https://github.com/in-toto/attestation/blob/main/spec/v1, https://slsa.dev/spec/v1.0/provenance,
https://cyclonedx.org/docs/1.6/json.
"""

import importlib.metadata
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

from enginesmith.core.digest import canonical_json
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from pipeline.values import Json

# The manifest's sources of these names are the statement and the SBOM.
STATEMENT = "provenance statement"
SBOM = "sbom"
BUILD_TYPE = "urn:enginesmith:build:v1"
# The image that the build runs in, if any, as the one who starts it says; a digest reference where possible.
IMAGE = "ENGINESMITH_BUILDER_IMAGE"

_LICENSE_TEXT = 100
_PURL_NAME = re.compile(r"[-_.]+")


def with_provenance(store: Store, draft: Manifest, entries: Sequence[EngineEntry], started_at: str) -> Manifest:
    """The draft with its statement and SBOM stored and named among its sources. started_at: ISO 8601, UTC."""
    sbom = store.put_bytes(canonical_json(environment_sbom()))
    statement = store.put_bytes(canonical_json(provenance_statement(draft, entries, started_at, sbom)))
    return replace(draft, sources={**draft.sources, STATEMENT: statement, SBOM: sbom})


def provenance_statement(draft: Manifest, entries: Sequence[EngineEntry], started_at: str, sbom: str) -> Json:
    """The statement about the engines of a version. Its subjects are the engines; the manifest cannot be one, since it
    names this statement. finishedOn is when the manifest was drafted, after the last proof."""
    image = os.environ.get(IMAGE)
    toolchains = {f"{name} {version}" for entry in entries for name, version in entry.toolchain.items()}
    materials = {**draft.sources, **draft.provenance}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _subjects(entries),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"model": draft.model, "spec": dict(draft.spec)},
                "internalParameters": {
                    "content": draft.content,
                    "toolchains": sorted(toolchains),
                    "host": {**draft.host, "nvidia driver": _driver()},
                },
                "resolvedDependencies": [
                    *({"name": name, "digest": {"sha256": digest}} for name, digest in sorted(materials.items())),
                    *(
                        {"uri": _purl(name, version)}
                        for name, version in sorted(draft.toolchain.items())
                        if version != "absent"
                    ),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": f"{BUILD_TYPE}#{'image' if image else 'host'}",
                    "version": {name: draft.toolchain[name] for name in ("enginesmith",) if name in draft.toolchain},
                    **({"builderDependencies": [{"uri": image}]} if image else {}),
                },
                "metadata": {"invocationId": draft.content, "startedOn": started_at, "finishedOn": draft.created_at},
                "byproducts": [
                    {"name": SBOM, "digest": {"sha256": sbom}, "mediaType": "application/vnd.cyclonedx+json"}
                ],
            },
        },
    }


def _subjects(entries: Sequence[EngineEntry]) -> list[Json]:
    """One per engine file; several units may share one."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        if entry.digest:
            names.setdefault(entry.digest, []).append(entry.unit)
    return [{"name": ", ".join(units), "digest": {"sha256": digest}} for digest, units in sorted(names.items())]


def _driver() -> str:
    """NVIDIA's driver on this host, as the kernel says, or 'none'."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as stream:  # noqa: PTH123 - not a path of ours
            return stream.read(100).strip()
    except (OSError, UnicodeDecodeError):
        return "none"


def environment_sbom() -> Json:
    """Every installed distribution of this process's environment.

    Without serial number and time, which CycloneDX leaves free: the same environment is the same bytes. Engines that
    were built on other hosts name their toolchain in the manifest.
    """
    found = {each["purl"]: each for each in map(_component, importlib.metadata.distributions()) if each}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "enginesmith build environment"}},
        "components": [found[purl] for purl in sorted(found)],
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{_PURL_NAME.sub('-', name).lower()}@{quote(version, safe='.')}"


def _component(item: importlib.metadata.Distribution) -> Json:
    """A distribution as a component; {} for a folder that is none any more."""
    metadata = item.metadata  # is read anew each time
    name, version = (str(metadata[field] or "") if metadata else "" for field in ("Name", "Version"))
    if not (name and version):
        return {}
    purl, licenses = _purl(name, version), _licenses(metadata)
    component: Json = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return component | ({"licenses": licenses} if licenses else {})


def _licenses(metadata: importlib.metadata.PackageMetadata) -> list[Json]:
    """An SPDX expression where there is one (PEP 639), else what is said in words; [] for nothing short."""
    if expression := metadata["License-Expression"]:
        return [{"expression": str(expression)}]
    classifiers = [str(line) for line in metadata.get_all("Classifier") or ()]
    classified = [line.rpartition("::")[2].strip() for line in classifiers if line.startswith("License ::")]
    said = str(metadata["License"] or "").strip()
    names = classified or ([said] if said and len(said) <= _LICENSE_TEXT and "\n" not in said else [])
    return [{"license": {"name": name}} for name in dict.fromkeys(names) if name]
