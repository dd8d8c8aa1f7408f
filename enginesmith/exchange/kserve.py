"""KServe: the Kubernetes objects that serve a version, and the URIs with which its storage initializer pulls it.

An `InferenceService` (serving.kserve.io/v1beta1) names the runtime, Triton, and the model's source: a URI
`enginesmith://MODEL@VERSION?target=l4`, or an image with the repository in `/models` (`registry export --layout
triton`), which KServe calls a model car. For such URIs a `ClusterStorageContainer` (v1alpha1) names the image that
pulls them: KServe runs it before the server, as `enginesmith initialize SRC DEST`, with DEST /mnt/models.

The objects name the version that the reference means now, not its channel: the start time of a pod must not decide the
version. Sources: kserve aaac4e2, pkg/apis/serving, pkg/webhook/admission/pod/storage_initializer_injector.go,
pkg/utils/storage.go, config/runtimes/kserve-tritonserver.yaml.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from enginesmith.core.errors import InputError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import parse_reference
from enginesmith.registry.manifest import EngineEntry, Manifest

SCHEME = "enginesmith"
RUNTIME = "kserve-tritonserver"
# Options of `enginesmith pull` that a URI may contain; flags have no value.
_OPTIONS = (
    "layout", "target", "precision", "runtime", "driver", "cuda", "memory", "fallback", "max-batch-size",
    "max-queue-delay", "registry",
)  # fmt: skip
_FLAGS = ("proven-only", "no-warmup")
_PINNED = re.compile(r"\S+@sha256:[0-9a-f]{64}")
# Security context of the client's container: it only writes to the volume that KServe has mounted.
_CLOSED: Mapping[str, object] = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
Json = dict[str, object]


def storage_uri(reference: str, options: Sequence[tuple[str, str]] = ()) -> str:
    """'enginesmith://digits@3?target=l4' for a reference and options of `pull`; flags have the value ''."""
    query = urlencode(options)
    return f"{SCHEME}://{quote(reference, safe='@:')}" + (f"?{query}" if query else "")


def pull_arguments(uri: str) -> list[str]:
    """The arguments of `enginesmith pull` for a URI, without DEST: ['digits@3', '--target', 'l4', '--layout',
    'triton'].

    The default layout is Triton's. Raises InputError for another scheme and options that a URI cannot have,
    UnknownNameError for a malformed reference.
    """
    scheme, separator, address = uri.partition("://")
    if scheme != SCHEME or not separator:
        raise InputError(f"{uri!r}: give a URI such as {SCHEME}://digits@3?target=l4")
    text, _, query = address.partition("?")
    arguments = [str(parse_reference(unquote(text).strip("/")))]
    query_pairs = parse_qsl(query, keep_blank_values=True)
    for name, value in query_pairs:
        if name not in (*_OPTIONS, *_FLAGS):
            raise InputError(f"{uri!r} has the unknown option {name!r}; known: {', '.join((*_OPTIONS, *_FLAGS))}")
        if name in _FLAGS and value not in ("", "true"):
            raise InputError(f"{uri!r}: {name} has no value; leave it out, or write {name} alone")
        arguments += [f"--{name}"] if name in _FLAGS else [f"--{name}", value]
    return arguments if any(name == "layout" for name, _ in query_pairs) else [*arguments, "--layout", "triton"]


@dataclass(frozen=True)
class Deployment:
    """A version for a cluster. engine: the one to serve.  options: of `pull`, for the URI.

    image: of the client, by digest; '' if an image contains the model.  car: that image, by digest; '' for a URI.
    registry: where the cluster pulls from.  Raises InputError for images without a digest, and unless exactly one is
    given.
    """

    manifest: Manifest
    engine: EngineEntry
    machine: Machine
    options: tuple[tuple[str, str], ...] = ()
    image: str = ""
    car: str = ""
    registry: str = ""

    def __post_init__(self) -> None:
        if bool(self.image) == bool(self.car):
            raise InputError(
                "give --image, the client's image that pulls in the cluster, or --car, an image of engines"
            )
        if not _PINNED.fullmatch(image_name := self.image or self.car):
            raise InputError(f"image {image_name!r} is not pinned: give NAME@sha256:DIGEST")

    def to_objects(self) -> list[Json]:
        """The InferenceService, and before it the ClusterStorageContainer if a URI needs one."""
        return [self._inference_service()] if self.car else [self._storage_container(), self._inference_service()]

    def _inference_service(self) -> Json:
        limits = {} if self.machine.is_cpu else {"nvidia.com/gpu": "1"}
        model: Json = {
            "modelFormat": {"name": "triton", "version": "2"},
            "runtime": RUNTIME,
            "protocolVersion": "v2",
            "storageUri": f"oci://{self.car}" if self.car else storage_uri(self.manifest.reference, self.options),
        }
        model |= {"resources": {"limits": limits}} if limits else {}
        # The name of an InferenceService: a-z, 0-9 and '-', a letter first.
        name = re.sub(r"[^a-z0-9-]", "-", self.manifest.model).strip("-")
        annotations = {
            "model": self.manifest.model,
            "version": self.manifest.version,
            "manifest": f"sha256:{self.manifest.digest}",
            "unit": self.engine.unit,
        }
        return {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {
                "name": name if name[0].isalpha() else f"m-{name}",
                "annotations": {f"enginesmith.io/{name}": value for name, value in annotations.items()},
            },
            "spec": {"predictor": {"model": model, **self._placement()}},
        }

    def _placement(self) -> Json:
        """The node selector and tolerations for the compute capability, by labels of NVIDIA's GPU feature discovery."""
        capability = self.machine.compute_capability
        if capability is None:
            return {}
        major, minor = map(str, capability)
        labels = {"nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor}
        toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        return {"nodeSelector": labels, "tolerations": [toleration]}

    def _storage_container(self) -> Json:
        container: Json = {
            "name": "storage-initializer",
            "image": self.image,
            "command": ["enginesmith", "initialize"],
            "env": [
                {"name": "ENGINESMITH_REGISTRY", "value": self.registry},
                # A pod pulls once, so a cache would only take the space twice.
                {"name": "ENGINESMITH_CACHE_BYTES", "value": "0"},
            ],
            "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": _CLOSED,
        }
        return {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "ClusterStorageContainer",
            "metadata": {"name": "enginesmith"},
            "spec": {
                "container": container,
                "supportedUriFormats": [{"prefix": f"{SCHEME}://"}],
                "supportsMultiModelDownload": True,
                "workloadType": "initContainer",
            },
        }
