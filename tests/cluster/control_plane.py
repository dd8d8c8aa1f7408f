"""etcd, API server, controller manager, scheduler and the KubeRay operator as processes on loopback."""

import csv
import json
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from urllib3.exceptions import HTTPError

from tests.cluster.api import Api, Object, RefusedError, wait_for
from tests.cluster.assets import Assets
from tests.pipeline.orchestration.flows.server import end

log = logging.getLogger("cluster")
PORTS = ("api", "client", "peer", "kube-controller-manager", "kube-scheduler", "metrics", "probes")
# Tokens are the users' names: nothing but this machine reaches the server, and all is gone with the folder.
USERS = {
    "admin": "system:masters",
    "kuberay-operator": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}


class ControlPlane:
    """The processes of one cluster, in `folder`; their logs lie there as NAME.log."""

    def __init__(self, assets: Assets, folder: Path) -> None:
        self.folder = folder
        self._assets = assets
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        # All at once: one that is not listened on yet would be given out again.
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.server = f"https://127.0.0.1:{self._ports['api']}"
        self.certificates = folder / "certificates/apiserver.crt"

    def start(self) -> None:
        """Start everything, in order. Raises TimeoutError where the API server does not answer."""
        start_s = time.monotonic()
        self._write_keys()
        self._start_etcd()
        self._start_api_server()
        wait_for("the API server's certificate", self.certificates.exists, 180)
        wait_for("the API server", self._is_ready, 180)
        for user in USERS:
            self.kubeconfig(user).write_text(self.kubeconfig_of(user, user))
        self._start_controllers()
        self._make_crds()
        self._start_operator()
        version = self.api().ask("GET", "/version")["gitVersion"]
        log.info("control plane: Kubernetes %s at %s after %.0f s", version, self.server, time.monotonic() - start_s)

    def stop(self) -> None:
        """End what was started, the last first, each by its process id."""
        for name, process in reversed(self._started.items()):
            end(process)
            log.info("control plane: %s (process %d) ended", name, process.pid)
        self._started.clear()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)  # the logs stay

    def api(self, token: str = "admin") -> Api:
        """The API as one of USERS, or as the service account that the token is of."""
        return Api(self.server, self.certificates, token)

    def kubeconfig(self, user: str = "admin") -> Path:
        return self.folder / f"{user.removeprefix('system:')}.kubeconfig"

    def _is_ready(self) -> bool:
        if (ended_status := self._started["kube-apiserver"].poll()) is not None:
            raise RuntimeError(f"kube-apiserver ended with {ended_status}; see {self.folder}/kube-apiserver.log")
        with suppress(RefusedError, HTTPError):
            return self.api().ask("GET", "/readyz") == {"message": "ok"}
        return False

    def _run(self, name: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("wb") as output:
            self._started[name] = subprocess.Popen(
                [str(self._assets.programs[name]), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for pytest, which then ends them in order
            )

    def _write_keys(self) -> None:
        private = rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.folder / "accounts.key").write_bytes(private)
        with (self.folder / "tokens.csv").open("w", newline="") as file:
            csv.writer(file).writerows([user, user, user, group] for user, group in USERS.items())

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{self._ports[name]}" for name in ("client", "peer"))
        self._run(
            "etcd", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip

    def _start_api_server(self) -> None:
        self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._ports['client']}",
            "--bind-address=127.0.0.1", f"--secure-port={self._ports['api']}", "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none", "--cert-dir=certificates", "--token-auth-file=tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=accounts.key",
            "--service-account-signing-key-file=accounts.key", "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC", "--disable-admission-plugins=TaintNodesByCondition",
        )  # fmt: skip

    def _start_controllers(self) -> None:
        for name in ("kube-controller-manager", "kube-scheduler"):
            file = self.kubeconfig(f"system:{name}")
            texts = [f"--{way}kubeconfig={file}" for way in ("", "authentication-", "authorization-")]
            more_texts = ["--bind-address=127.0.0.1", f"--secure-port={self._ports[name]}", "--leader-elect=false"]
            if name == "kube-controller-manager":
                # Nodes here have no heartbeat.
                more_texts += ["--controllers=*,-node-lifecycle-controller", "--use-service-account-credentials=true"]
                more_texts += ["--service-account-private-key-file=accounts.key", f"--root-ca-file={self.certificates}"]
            self._run(name, *texts, *more_texts, f"--cert-dir={name}-certificates")

    def _make_crds(self) -> None:
        api = self.api()
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        crds = [yaml.load(path.read_text(), Loader=loader) for path in self._assets.crds]
        for crd in crds:
            api.create("customresourcedefinitions", "", crd)
        wait_for("the kinds of other operators", lambda: all(_is_served(api, crd["spec"]) for crd in crds), 180)

    def _start_operator(self) -> None:
        self._run(
            "kuberay-operator", "--enable-leader-election=false", f"--metrics-addr=127.0.0.1:{self._ports['metrics']}",
            f"--health-probe-bind-address=127.0.0.1:{self._ports['probes']}",
            environment={"KUBECONFIG": str(self.kubeconfig("kuberay-operator"))},
        )  # fmt: skip

    def kubeconfig_of(self, user: str, token: str) -> str:
        cluster = {"server": self.server, "certificate-authority": str(self.certificates)}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}], "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        }  # fmt: skip
        return json.dumps(config)


def _is_served(api: Api, spec: Object) -> bool:
    """Whether the server's discovery names a kind; before that, Helm refuses its objects."""
    places = [f"/apis/{spec['group']}/{version['name']}" for version in spec["versions"] if version["served"]]
    with suppress(RefusedError):
        return all(repr(spec["names"]["plural"]) in str(api.ask("GET", place)) for place in places)
    return False


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [item.getsockname()[1] for item in sockets]
