"""What a channel serves, as a check compares with it: the version, its engines that run here, their bytes."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import parse_reference
from enginesmith.core.types import Target
from enginesmith.registry.ensembles import require_model
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import list_served
from enginesmith.registry.evidence.latencies import measured_speeds
from enginesmith.registry.leases import version_name
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions.lookup import locate
from pipeline.operations.revalidate import why_not_here

# The reference of a first version, which is compared with nothing.
NONE = "none"


@dataclass(frozen=True)
class ServedVersion:
    """A version that is served. store: its registry.  channel: through which it was found.  proven_only: as it says.

    pulled: the engine that this machine is given.  here: the served engines that run here, by unit.
    """

    store: Store
    manifest: Manifest
    channel: str | None
    proven_only: bool
    served: tuple[EngineEntry, ...]
    pulled: EngineEntry
    here: Mapping[str, EngineEntry]

    @property
    def name(self) -> str:
        """'digits@3'."""
        return f"{self.manifest.model}@{self.manifest.version}"


def machine_of(target: Target) -> Machine:
    """A machine of this target, for a CPU of this machine's kind."""
    return replace(Machine.of(target), cpu=this_kind().name if target.is_cpu else None)


def find_served(store: Store, model: str, reference: str | None, machine: Machine) -> ServedVersion | None:
    """The version that a reference stands for, None for 'none'. reference: None for the model's channel stable, else
    candidate, else its newest version.  machine: this one.

    Raises InputError for a version of another model or without an engine that runs here, UnknownNameError for one that
    is not there, UntrustedError without the signatures that the trust policy asks for.
    """
    if reference == NONE:
        return None
    named = parse_reference(reference or model)
    if named.model != model:
        raise InputError(f"--against {reference}: the spec is of model {model!r}; give a version or channel of that")
    try:
        located = locate(store, named)
        manifest = located.manifest
        require_model(manifest)
        known = judge_entries(store, manifest, require(store, manifest).counts)
        timed = partial(measured_speeds, store, manifest, machine)
        policy = Policy(proven_only=located.proven_only)
        pulled = rank_engines(known, machine, policy, version_name(model, manifest.version), timed).resolution().chosen
    except UnknownNameError as error:
        raise UnknownNameError(f"{error}\n  --against {NONE} checks a spec of which nothing is served here") from None
    served = list_served([entry.on_cpu(this_kind().name) for entry in known], located.proven_only)
    here = {entry.unit: entry for entry in served if why_not_here(entry) is None}
    if pulled.unit not in here:
        raise InputError(
            f"{pulled.unit} of {version_name(model, manifest.version)}, which is served to this machine, does not run "
            f"here: {why_not_here(pulled)}; check on a machine that can run it, or with --against {NONE}"
        )
    channel = located.channel.name if located.channel else None
    return ServedVersion(store, manifest, channel, located.proven_only, tuple(served), pulled, here)


def copy_engine(served: ServedVersion, entry: EngineEntry, dest: Store) -> None:
    """Copy an engine's blobs, with the graph that it was built from, to a store that is not the version's own."""
    if dest.uri == served.store.uri:
        return
    named = [str(digest) for digest in (entry.digest, entry.graph) if digest]
    shards = [shard for digest in named for shard in served.manifest.shards.get(digest, {})]
    with tempfile.TemporaryDirectory(prefix="enginesmith-check-") as folder:
        for digest in (*shards, *named):
            if not dest.has(digest):
                path = Path(folder) / digest
                served.store.fetch(digest, path)
                dest.put_file(path)
                path.unlink()
