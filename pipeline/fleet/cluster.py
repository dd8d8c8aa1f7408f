"""Reads the nodes of a Kubernetes cluster through its official client, in a pod or with a kubeconfig.

They are read page by page and kept as JSON: the client's typed objects cost ten times the time, and the same code reads
what `kubectl` prints.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from enginesmith.core.errors import InputError, UnavailableError
from enginesmith.core.parsing import find, read
from enginesmith.core.types import Untyped
from pipeline.fleet.groups import Fleet
from pipeline.fleet.inventory import fleet_of_nodes

_PAGE = 500
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_GONE = 410
# Of a list that changes faster than its pages are read.
_RESTARTS = 3

_REMEDIES = {
    401: "the cluster does not accept these credentials; `kubectl get nodes` with them says more",
    403: "the user or ServiceAccount may not list nodes; bind it a ClusterRole with verb list on nodes",
}


@dataclass(frozen=True)
class Access:
    """How to reach the cluster. kubeconfig: a file; None is KUBECONFIG, else a pod's own account, else ~/.kube/config.
    context: of the kubeconfig; None is its current one.  timeout_s: of each request, in seconds."""

    kubeconfig: Path | None = None
    context: str | None = None
    timeout_s: float = 30.0

    @property
    def in_cluster(self) -> bool:
        """Whether a pod's own account is used."""
        chosen = self.kubeconfig or self.context or os.environ.get("KUBECONFIG")
        return not chosen and _IN_CLUSTER in os.environ


def read_cluster(access: Access) -> Fleet:
    """The cluster's nodes, grouped.

    Raises InputError for a kubeconfig that cannot be used, UnavailableError without the client, and when the cluster
    does not answer, or not to these credentials.
    """
    connection = connection_to(access)
    from kubernetes import client

    host = str(connection.configuration.host)
    return fleet_of_nodes(_nodes(client.CoreV1Api(connection), host, access.timeout_s), host)


def connection_to(access: Access) -> Untyped:
    """The client's connection to the cluster. Raises InputError and UnavailableError, as `read_cluster`."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UnavailableError(
            f"reading a cluster needs the extra `kubernetes` ({error}); run `pip install '.[kubernetes]' in a clone`, "
            "or "
            "give `--inventory -` what `kubectl get nodes -o json` prints"
        ) from error
    settings = client.Configuration()
    try:
        if access.in_cluster:
            config.load_incluster_config(client_configuration=settings)
            # A pod reaches its own API server by an address that no NO_PROXY names, and never through HTTPS_PROXY.
            settings.proxy = None
        else:
            # Named here: the client reads KUBECONFIG once, when it is imported.
            config.load_kube_config(
                str(access.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"),
                access.context,
                client_configuration=settings,
                persist_config=False,
            )
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
        where = access.kubeconfig or ("the pod's account" if access.in_cluster else "the kubeconfig")
        words = " ".join(str(error).split())[:200]
        raise InputError(f"{where}: {words}; name a file with --kubeconfig, or give an --inventory") from error
    # By default the client repeats a failed request three times, with growing pauses: too long at a terminal.
    settings.retries = 1
    return client.ApiClient(settings)


def _nodes(api: Untyped, host: str, timeout_s: float) -> Iterator[Mapping[str, object]]:
    """Every node. A list that expired while its pages were read is read again from its start."""
    for _ in range(_RESTARTS):
        found: list[Mapping[str, object]] = []
        token = None
        while True:
            page = _read_page(api, token, host, timeout_s)
            if page is None:
                break
            found += read(page, "items", list)
            token = find(page, "metadata.continue", str, None)
            if not token:
                yield from found
                return
    raise UnavailableError(f"{host}: its list of nodes keeps changing while it is read; run again")


def _read_page(api: Untyped, token: str | None, host: str, timeout_s: float) -> Mapping[str, object] | None:
    """One page of nodes; None when its token has expired. Raises UnavailableError, with a remedy."""
    import urllib3
    from kubernetes.client.exceptions import ApiException

    chosen = {"_continue": token} if token else {}
    try:
        answer = api.list_node(limit=_PAGE, _preload_content=False, _request_timeout=(timeout_s, timeout_s), **chosen)
        page = json.loads(answer.data)
    except ApiException as error:
        if error.status == _GONE:
            return None
        remedy = _REMEDIES.get(error.status, "look at the API server")
        raise UnavailableError(f"{host}: {error.status} {error.reason}; {remedy}") from error
    except urllib3.exceptions.HTTPError as error:
        reason = str(getattr(error, "reason", None) or error)
        short = (reason.partition("object at")[0] if " object at 0x" in reason else reason)[:200]
        raise UnavailableError(
            f"{host} does not answer ({short}); is the kubeconfig's cluster the right one, and up?"
        ) from error
    except ValueError as error:
        raise UnavailableError(f"{host}: its answer is not JSON ({error}); is it a Kubernetes API?") from error
    if not isinstance(page, dict) or not isinstance(page.get("items"), list):
        raise UnavailableError(f"{host}: its answer is no list of nodes; is it a Kubernetes API?")
    return page
