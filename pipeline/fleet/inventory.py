"""The inventory of a fleet, from a file or a cluster's nodes."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from enginesmith.core import parsing
from enginesmith.core.errors import InputError, SpecError, UnavailableError, UnknownNameError
from enginesmith.core.hardware.machine import GENERATIONS, Machine, generation_of, parse_targets
from enginesmith.core.text import find_nearest
from enginesmith.core.types import Untyped
from pipeline.fleet.groups import Fleet, GpuPart, Hardware, LeftOut, NodeGroup, group_nodes, parts_of
from pipeline.spec.document import Kind, parse_document
from pipeline.spec.source import SpecPart as Closed

# Reads an inventory file: groups that a person wrote down (docs/guides/fleet.md), or the output of
# `kubectl get nodes -o json`.

# 500 nodes with all their labels, annotations and images are about 10 MB.
MOST_BYTES = 512 << 20
LARGEST_YAML_BYTES = 1 << 20
_GIB = 1 << 30


def check_version(option: str, text: str | None) -> str | None:
    """The version in an option's text; None without one. Raises InputError for a malformed version."""
    try:
        return None if text is None else _version(text)
    except ValueError as error:
        raise InputError(f"--{option.replace('_', '-')} {text!r}: {error}") from error


def _text(value: object) -> object:
    """Refuse a version that YAML reads as a number: 11.10 would become 11.1."""
    if isinstance(value, int | float):
        raise ValueError("is read as a number; put it in quotes")
    return value


def _version(text: str) -> str:
    if not re.fullmatch(r"\d[\w.]{0,30}", text, re.ASCII):
        raise ValueError("must be a version such as '570.124.06'")
    return text


def _runtime_name(text: str) -> str:
    """The normalized name of a distribution: 'onnxruntime-gpu', also for 'onnxruntime_gpu'."""
    if text != "driver" and find_nearest(text, ["driver"]):
        raise ValueError("did you mean 'driver'?")
    if not re.fullmatch(r"[a-z\d][a-z\d._-]{0,99}", text, re.ASCII | re.IGNORECASE):
        raise ValueError("must be a package's name such as 'onnxruntime-gpu'")
    return re.sub(r"[._-]+", "-", text).lower()


def _capability(text: str) -> str:
    if not re.fullmatch(r"\d{1,2}\.\d", text, re.ASCII):
        raise ValueError("must be a compute capability such as '8.9'")
    return text


Version = Annotated[str, BeforeValidator(_text), AfterValidator(_version)]
RuntimeName = Annotated[str, AfterValidator(_runtime_name)]
Capability = Annotated[str, BeforeValidator(_text), AfterValidator(_capability)]


class Written(Closed):
    """One group of nodes in an inventory file."""

    product: str | None = Field(None, description="short name (l4), node label (NVIDIA-L4) or cpu")
    capability: Capability | None = Field(None, description="of a GPU that has no product here")
    count: int = Field(1, ge=1, le=1_000_000, strict=True, description="nodes")
    gpus: int | None = Field(None, ge=0, strict=True, description="GPUs or slices of all of them; default: one a node")
    driver: Version | None = None
    cuda: Version | None = None
    runtimes: dict[RuntimeName, Version] = Field({}, description="versions of what serves there")
    memory_gib: float | None = Field(None, gt=0, description="of a GPU or slice")
    mig: str | None = Field(None, pattern=r"^\d+[gc][\w.+]*$", description="profile of the slices, '1g.10gb'")
    sharing: Literal["time-slicing", "mps"] | None = None
    replicas: int = Field(1, ge=1, strict=True)

    @model_validator(mode="after")
    def _check_known(self) -> Self:
        if self.product is None and self.capability is None:
            raise ValueError("has neither product nor capability; give one")
        try:
            self.hardware()
        except UnknownNameError as error:
            raise ValueError(str(error)) from error
        return self

    def hardware(self) -> Hardware:
        """The hardware of the nodes. Raises UnknownNameError for an unknown product without a capability."""
        capability, product, label = self._gpu()
        machine = Machine(
            capability,
            None if self.mig else product,
            self.driver,
            self.cuda,
            self.runtimes,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * _GIB),
        )
        return Hardware(machine, label, product, self.mig, self.sharing, self.replicas)

    def _gpu(self) -> tuple[tuple[int, int] | None, str | None, str]:
        """Compute capability, short name and label."""
        capability = None
        if self.capability is not None:
            major, minor = self.capability.split(".")
            capability = int(major), int(minor)
        for generation in GENERATIONS:
            for product, labels in generation.products.items():
                if self.product in labels and capability in (None, generation.compute_capability):
                    return generation.compute_capability, product, str(self.product)
        if self.product is None or capability is not None:
            gpu_generation = generation_of(capability) if capability else None
            listed_product = self.product if gpu_generation and self.product in gpu_generation.products else None
            return capability, listed_product, self.product or "unknown"
        targets = parse_targets(self.product)
        if len(targets) > 1:
            raise UnknownNameError(f"product {self.product!r} stands for several; give the capability, too")
        return targets[0].compute_capability, targets[0].product, self.product


class NodeInventory(Closed):
    """An inventory file."""

    groups: tuple[Written, ...] = Field(min_length=1)


KIND = Kind(
    NodeInventory, "an inventory", "groups", "docs/guides/fleet.md has one; `kubectl get nodes -o json` makes one"
)


def read_inventory(path: Path) -> Fleet:
    """The fleet that a file describes; '-' reads standard input.

    Raises SpecError with one line per mistake, InputError for a text that is neither an inventory nor a list of nodes.
    """
    name = "standard input" if str(path) == "-" else str(path)
    text = _read(path, name)
    if text.lstrip().startswith("{") and (nodes := _nodes(text, name)) is not None:
        return fleet_of_nodes(nodes, name)
    if len(text) > LARGEST_YAML_BYTES:
        raise InputError(f"{name}: has {len(text)} characters and is not the JSON of `kubectl get nodes -o json`")
    if re.search(r"^kind: *(List|NodeList)\b", text, re.MULTILINE):
        raise InputError(f"{name}: is a list of nodes as YAML; use `kubectl get nodes -o json`")
    document, _ = parse_document(Path(name), text, KIND)
    groups = []
    for group in document.groups:
        hardware = group.hardware()
        gpus = 0 if hardware.machine.is_cpu else group.count
        groups.append(NodeGroup(hardware, group.count, gpus if group.gpus is None else group.gpus))
    return Fleet((), (), name).with_groups(groups)


def fleet_of_nodes(nodes: Iterable[Mapping[str, object]], source: str) -> Fleet:
    """The fleet of these nodes of the Kubernetes API."""
    node_parts = [node_part for node in nodes for node_part in parts_of(node)]
    gpu_parts = [node_part for node_part in node_parts if isinstance(node_part, GpuPart)]
    return group_nodes(gpu_parts, [node_part for node_part in node_parts if isinstance(node_part, LeftOut)], source)


def _read(path: Path, name: str) -> str:
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError([f"{name}: no such file; {KIND.help}"]) from None
    except OSError as error:
        raise SpecError([f"{name}: cannot be read: {error.strerror or error}"]) from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{name}: is larger than {MOST_BYTES >> 20} MiB; this is not a list of nodes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SpecError([f"{name}: is not UTF-8 text; {KIND.help}"]) from None


def _nodes(text: str, name: str) -> list[Mapping[str, object]] | None:
    """The nodes in kubectl's output (a list or one node); None for JSON with groups. Otherwise raises InputError."""
    try:
        document = parsing.load_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: is not JSON ({error}); {KIND.help}") from None
    if not isinstance(document, dict) or "groups" in document:
        return None
    if document.get("kind") == "Node":
        return [document]
    items = document.get("items")
    # Items of the API's own NodeList have no kind; kubectl's List gives each its own.
    if not isinstance(items, list) or any(
        not isinstance(node, dict) or node.get("kind", "Node") != "Node" for node in items
    ):
        raise InputError(f"{name}: is JSON without groups, and not a list of nodes; {KIND.help}")
    return items


# Reads the nodes of a Kubernetes cluster through its official client, in a pod or with a kubeconfig.
#
# Nodes stay JSON: the client's typed objects take ten times as long, and the same code reads the output of `kubectl`.

_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_REMEDIES = {
    401: "the cluster does not accept these credentials; run `kubectl get nodes` with them to see why",
    403: "the user or ServiceAccount may not list nodes; bind it a ClusterRole with verb list on nodes",
}


@dataclass(frozen=True)
class Access:
    """How to reach the cluster. kubeconfig: a file; None: KUBECONFIG, else the pod's own account, else ~/.kube/config.
    context: of the kubeconfig; None: its current one.  timeout_s: of each request, in seconds."""

    kubeconfig: Path | None = None
    context: str | None = None
    timeout_s: float = 30.0

    @property
    def in_cluster(self) -> bool:
        """Whether a pod's own account is used."""
        config_source = self.kubeconfig or self.context or os.environ.get("KUBECONFIG")
        return not config_source and _IN_CLUSTER in os.environ


def read_cluster(access: Access) -> Fleet:
    """The cluster's nodes, grouped.

    Raises InputError for an unusable kubeconfig, UnavailableError if the client is not installed, or if the cluster
    does not answer or rejects the credentials.
    """
    connection = connection_to(access)
    import urllib3
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException

    host, limits_s = str(connection.configuration.host), (access.timeout_s, access.timeout_s)
    try:
        response = client.CoreV1Api(connection).list_node(_preload_content=False, _request_timeout=limits_s)
        document = json.loads(response.data)
    except ApiException as error:
        remedy = _REMEDIES.get(error.status, "look at the API server")
        raise UnavailableError(f"{host}: {error.status} {error.reason}; {remedy}") from error
    except urllib3.exceptions.HTTPError as error:
        reason = str(getattr(error, "reason", None) or error)
        short_reason = (reason.partition("object at")[0] if " object at 0x" in reason else reason)[:200]
        raise UnavailableError(
            f"{host} does not answer ({short_reason}); is the kubeconfig's cluster the right one, and up?"
        ) from error
    except ValueError as error:
        raise UnavailableError(f"{host}: its answer is not JSON ({error}); is it a Kubernetes API?") from error
    if not isinstance(document, dict) or not isinstance(document.get("items"), list):
        raise UnavailableError(f"{host}: its answer is not a list of nodes; is it a Kubernetes API?")
    return fleet_of_nodes(document["items"], host)


def connection_to(access: Access) -> Untyped:
    """The client's connection to the cluster. Raises InputError and UnavailableError, as `read_cluster`."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UnavailableError(
            f"reading a cluster needs the extra `kubernetes` ({error}); run `pip install '.[kubernetes]'` in a clone, "
            "or give `--inventory -` what `kubectl get nodes -o json` prints"
        ) from error
    settings = client.Configuration()
    try:
        if access.in_cluster:
            config.load_incluster_config(client_configuration=settings)
            # A pod reaches its own API server by an address that no NO_PROXY names, and never through HTTPS_PROXY.
            settings.proxy = None
        else:
            # The client itself reads KUBECONFIG only once, at its import.
            config.load_kube_config(
                str(access.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"),
                access.context,
                client_configuration=settings,
                persist_config=False,
            )
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
        source = access.kubeconfig or ("the pod's account" if access.in_cluster else "the kubeconfig")
        error_text = " ".join(str(error).split())[:200]
        raise InputError(f"{source}: {error_text}; name a file with --kubeconfig, or give an --inventory") from error
    # By default the client repeats a failed request three times, with growing pauses: too long at a terminal.
    settings.retries = 1
    return client.ApiClient(settings)
