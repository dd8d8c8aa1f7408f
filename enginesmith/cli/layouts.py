"""Options and output of `pull` for other layouts than the plain one: Triton, model packages and KServe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from enginesmith.cli.options import COUNT, Option, ShortTime, emit_json, say
from enginesmith.cli.tables import echo
from enginesmith.core.names import parse_reference
from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import absolute_uri
from enginesmith.registry.store.files import make_folder, write_whole

if TYPE_CHECKING:
    from enginesmith.client.client import Client
    from enginesmith.client.layouts.base import Placed
    from enginesmith.client.layouts.model_package import ModelPackage
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.core.hardware.machine import Machine

# Options that are valid for one layout only.
FOR_TRITON = ("max_batch_size", "max_queue_delay", "warmup")
FOR_KSERVE = ("image", "car")


@dataclass(frozen=True)
class LayoutOptions:
    """The layout of engines in DEST."""

    layout: Annotated[
        Literal["plain", "triton", "ortpackage", "kserve"],
        Option(
            "Layout of DEST; plain: the engine file; triton: a Triton model repository; ortpackage: an ONNX Runtime "
            "model package; kserve: Kubernetes objects with which KServe loads the engine."
        ),
    ] = "plain"
    max_batch_size: Annotated[
        int | None,
        Option("With --layout triton: enable dynamic batching, with at most this many samples per batch.", type=COUNT),
    ] = None
    max_queue_delay: Annotated[
        float | None,
        Option(
            "With --layout triton: enable dynamic batching; a request waits at most this long for others, e.g. 2ms.",
            type=ShortTime(),
        ),
    ] = None
    warmup: Annotated[
        bool, Option("With --layout triton: Triton runs golden inputs before it serves.", name="--warmup/--no-warmup")
    ] = True
    image: Annotated[
        str | None, Option("With --layout kserve: client image that pulls the engine in the cluster, by digest.")
    ] = None
    car: Annotated[
        str | None,
        Option(
            "With --layout kserve: model image instead of a pull, by digest (`registry export --layout triton`).",
            metavar="IMAGE",
        ),
    ] = None

    def of_several(self) -> "Triton | ModelPackage":
        """The layout that the options select, for several engines."""
        from enginesmith.client.layouts.model_package import ModelPackage
        from enginesmith.client.layouts.triton import Triton
        from enginesmith.client.layouts.triton_config import DynamicBatching

        if self.layout == "ortpackage":
            return ModelPackage()
        batching = DynamicBatching(self.max_batch_size, self.max_queue_delay)
        return Triton(batching if batching != DynamicBatching() else None, self.warmup)


def write_objects(
    client: "Client",
    reference: str,
    dest: Path,
    target: str,
    machine: "Machine",
    layout: LayoutOptions,
    stated: Mapping[str, str],
    as_json: bool,
) -> None:
    """Write DEST/MODEL.yaml: the Kubernetes objects that serve the version in a cluster. Downloads nothing.

    stated: further options of the cluster's `pull`.
    """
    import yaml

    from enginesmith.client.layouts.base import rank_each
    from enginesmith.client.layouts.triton import Triton
    from enginesmith.client.locate import VersionLocator
    from enginesmith.exchange.kserve import Deployment

    located_version = VersionLocator(client.store, checked=True).locate(parse_reference(reference))
    ranked_version, (ranking,) = rank_each(client.store, located_version, [machine], client.policy, Triton())
    engine, manifest = ranking.resolution().chosen, ranked_version.manifest
    Triton().check(manifest, [engine])
    deployment = Deployment(
        manifest,
        engine,
        machine,
        options=(
            ("target", target),
            ("precision", engine.precision),
            *stated.items(),
            *(("runtime", f"{name}={version}") for name, version in machine.runtimes.items()),
        ),
        image=layout.image or "",
        car=layout.car or "",
        registry=absolute_uri(str(client.registry)),
    )
    path = dest / f"{manifest.model}.yaml"
    make_folder(dest)
    write_whole(path, yaml.safe_dump_all(deployment.to_objects(), sort_keys=False).encode())
    if as_json:
        emit_json({"path": str(path), "model": manifest.model, "version": manifest.version, "unit": engine.unit})
        return
    echo(str(path))
    if deployment.registry.startswith("file://") and deployment.image:
        say(f"note: {deployment.registry} is a local folder; mount it in the container")
    echo(f"serves: {engine.unit} of {manifest.reference}, {engine.status}")


def show_placed(placed: "Placed", config: str, as_json: bool) -> None:
    """Print the engines in a repository or package. config: the name of the file that lists them."""
    from enginesmith.client.resolve import list_targets

    for pull in placed.pulled:
        for line in (*pull.warnings, *(f"note: {remark}" for remark in pull.resolution.remarks)):
            say(line)
    first_pull = placed.pulled[0]
    manifest = first_pull.located.manifest
    if as_json:
        files = [{"path": str(pull.path), "unit": pull.engine.unit, "origin": pull.origin} for pull in placed.pulled]
        emit_json(
            {
                "model": manifest.model,
                "version": manifest.version,
                "folder": str(placed.folder),
                "config": str(placed.current / config),
                "swapped": placed.swapped,
                "engines": files,
            }
        )
        return
    echo(f"{placed.folder}{'' if placed.swapped else ' (was served already)'}")
    for pull in placed.pulled:
        echo(f"chosen: {pull.path.relative_to(placed.folder)}: {pull.engine.unit} of {manifest.reference}")
        echo(f"why:    {pull.resolution.why}")
    chosen_units = {entry.unit for pull in placed.pulled for entry in pull.resolution.ranked}
    rejections = [
        rejection
        for pull in placed.pulled
        for rejection in pull.resolution.rejected
        if rejection[0] not in chosen_units
    ]
    # If an engine has several reasons, the last is shown: that for the machine for which the engine was built.
    reasons = dict(sorted(rejections, key=lambda row: not row[1].startswith("built for ")))
    units_by_reason: dict[str, list[str]] = {}
    for unit, reason in reasons.items():
        units_by_reason.setdefault("" if reason.startswith("built for ") else reason, []).append(unit)
    other_units = units_by_reason.pop("", [])
    for reason, units in units_by_reason.items():
        echo(f"not:    {', '.join(units)}: {reason}")
    if other_units:
        echo(f"not:    {pluralize(len(other_units), 'engine')} for other hardware: {list_targets(other_units)}")
