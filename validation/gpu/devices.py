"""The device that the kit measures, and bundles of published engines for a machine without the registry."""

import base64
import hashlib
import math
import os
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from builders.backends.installed_versions import versions_of
from builders.onnx_graphs.bodies import list_shards
from enginesmith.arrays import Array
from enginesmith.core import parsing
from enginesmith.core.codec import decode, document_error, encode
from enginesmith.core.errors import Digest, IntegrityError, ModelError, UnavailableError, canonical_json, digest_of_file
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.cpu_kinds import CPU
from enginesmith.core.hardware.machine import driver_version, product_of
from enginesmith.core.names import FileName, NodeName
from enginesmith.core.reports.proof import Answers, PackedArray
from enginesmith.core.requirements import Format
from enginesmith.core.types import BuildRequest, Engine, Session, Target, Tensors, TensorSpec
from validation.comparison.sessions import run
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import GoldenSet

_DISTRIBUTIONS = ("enginesmith", "torch", "triton", "numpy", "onnx")


@dataclass(frozen=True)
class KitDevice:
    """The measured device. device: 'cuda' or 'cpu', as in torch.  cuda: the driver's CUDA version.

    label: the GPU's label from GPU feature discovery.  driver: its version; '' for the CPU.
    name: as the driver reports it.  memory_bytes: 0 if unknown.  compute_capability: None for the CPU.
    product: short name ('l4'), or None.
    """

    device: str
    name: str
    label: str = ""
    memory_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    compute_capability: tuple[int, int] | None = None
    product: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.compute_capability is None

    @property
    def target(self) -> Target:
        """The target of engines for this device."""
        capability = self.compute_capability
        return CPU if capability is None else Target("sm_{}{}".format(*capability), capability, self.product)


def find_device(kind: str) -> KitDevice:
    """The CPU, or this machine's first GPU. Raises UnavailableError without a GPU, or if torch does not find a GPU."""
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return KitDevice("cpu", platform.processor() or platform.machine(), memory_bytes=memory)
    devices = cuda.gpus()
    if not devices:
        raise UnavailableError(
            "no NVIDIA GPU on this machine, or no driver; run the kit with --device cpu to try it out"
        )
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError(
            f"torch {torch.__version__} does not see the GPU; install a build of torch for CUDA {cuda.cuda_version()}"
        )
    gpu = devices[0]
    label, capability = gpu.name.replace(" ", "-"), gpu.compute_capability
    versions = driver_version() or "", cuda.cuda_version() or ""
    product = product_of(capability, label)
    return KitDevice("cuda", gpu.name, label, gpu.memory_bytes, *versions, capability, product)


def software() -> dict[str, str]:
    """Versions of Python, of the system and of the packages that affect measurements."""
    versions = {"python": platform.python_version(), "system": platform.platform(), **versions_of(*_DISTRIBUTIONS)}
    if torch := sys.modules.get("torch"):
        versions["torch"] = str(torch.__version__)
    return versions


# Published engines in a folder: one machine runs them without the registry, and another one judges the answers.
#
#     carry.json             model, version and manifest of the engines; digest, request and file of each
#     cases.json, cases.npz  the golden cases
#     engines/               the engines' files
#     graphs/NAME/           for an ensemble: such a folder for each graph; the ensemble's golden cases are in cases.*
#
# `enginesmith validate REF --carry FOLDER` writes it; `enginesmith validate --import RESULTS` judges the kit's results.

FORMAT = 1


@dataclass(frozen=True)
class _Entry:
    digest: Digest
    request: BuildRequest
    file: FileName


@dataclass(frozen=True)
class BundledNode:
    """A graph of an ensemble. engine: digest of the graph's engine.  sources: the source of each input."""

    name: NodeName
    engine: Digest
    sources: Mapping[str, str]


@dataclass(frozen=True)
class BundledEnsemble:
    """An ensemble, one unit of its version. nodes: its graphs and functions, in order."""

    unit: str
    digest: str
    nodes: tuple[BundledNode, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class _BundleDocument:
    model: str
    version: str
    manifest: str
    golden: str
    engines: tuple[_Entry, ...]
    ensembles: tuple[BundledEnsemble, ...] = ()
    kind: Literal["enginesmith-carried"] = "enginesmith-carried"
    format: Annotated[int, Format(FORMAT)] = FORMAT


@dataclass(frozen=True)
class OfflineBundle:
    """The contents of a folder. manifest, golden: digests of the version's manifest and golden set.

    ensembles: empty unless the version is of an ensemble.  graphs: the bundles of an ensemble's graphs, by name.
    """

    model: str
    version: str
    manifest: str
    golden: str
    engines: tuple[Engine, ...]
    folder: Path
    ensembles: tuple[BundledEnsemble, ...] = ()
    graphs: Mapping[str, "OfflineBundle"] = field(default_factory=dict)

    def save(self) -> None:
        """Write carry.json; the files that it names must exist."""
        engines = tuple(_Entry(engine.digest, engine.request, engine.path.name) for engine in self.engines)
        document = _BundleDocument(self.model, self.version, self.manifest, self.golden, engines, self.ensembles)
        (self.folder / "carry.json").write_bytes(canonical_json(encode(document)))

    def engine(self, node: BundledNode) -> Engine:
        """The engine of a graph. Raises IntegrityError if its folder lacks the engine."""
        for entry in self.graphs[node.name].engines:
            if entry.digest == node.engine:
                return entry
        raise IntegrityError(f"{self.folder} lacks engine {node.engine} of graph {node.name!r}; copy the folder again")

    @classmethod
    def load(cls, folder: Path) -> "OfflineBundle":
        """Read a folder and check its engines' digests. Raises IntegrityError for changed or damaged files."""
        try:
            document = decode(parsing.load_json((folder / "carry.json").read_bytes()), _BundleDocument)
            engines = tuple(_check_engine(entry, folder) for entry in document.engines)
            names = {node.name for ensemble in document.ensembles for node in ensemble.nodes}
            graphs = {name: cls.load(folder / "graphs" / name) for name in sorted(names)}
            header_fields = document.model, document.version, document.manifest, document.golden
            return cls(*header_fields, engines, folder, document.ensembles, graphs)
        except (OSError, ValueError, IntegrityError, ModelError, RecursionError) as error:
            error_prefix = f"{folder} cannot be read as a folder of `enginesmith validate --carry`"
            raise document_error(error_prefix, error, "copy the folder again") from error


def _check_engine(entry: _Entry, folder: Path) -> Engine:
    path = folder / "engines" / entry.file
    if digest_of_file(path) != entry.digest:
        raise ValueError(f"{path.name} does not have the digest {entry.digest} of carry.json")
    for shard in list_shards(path) if path.suffix == ".onnx" else ():
        if digest_of_file(path.with_name(shard)) != shard:
            raise ValueError(f"shard {shard} of {path.name} has another digest than its name")
    return Engine(entry.request, path, entry.digest, path.stat().st_size, path.suffix)


# The answers of a session to the calls of its proof, as text: another machine judges them.
#
# Answers are stored by the digest of the inputs (names, types, shapes and bytes), and cannot count for other inputs.
# Each is the array's bytes, packed by zlib, in base64. A model with state runs its sequences in the same way: the
# answer to one step contains inputs of the next.

# The most bytes of one unpacked array: otherwise a small text could unpack to more than the memory.
MAX_BYTES = 256 << 20
_KINDS = "biuf"


class RecordingSession(Session):
    """A session that records the first answer to each call in `answers`.

    scope: name of the session if `answers` has several sessions.  follow: whether a repeated call returns the stored
    answer; a sequence then continues from the record even if the device does not repeat its bits.
    """

    def __init__(
        self,
        session: Session,
        answers: dict[str, dict[str, PackedArray]] | None = None,
        follow: bool = False,
        scope: str = "",
    ) -> None:
        self.inputs: Sequence[TensorSpec] = session.inputs
        self.outputs: Sequence[TensorSpec] = session.outputs
        self.answers = {} if answers is None else answers
        self._session, self._follow, self._scope = session, follow, scope

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run, and record the outputs."""
        question_key = question(inputs, self._scope)
        if self._follow and question_key in self.answers:
            return {name: unpack(value) for name, value in self.answers[question_key].items()}
        outputs = self._session.run(inputs)
        self.answers.setdefault(question_key, {name: pack(array) for name, array in outputs.items()})
        return outputs


class ReplaySession(Session):
    """A session that returns recorded answers. `run` raises IntegrityError for inputs without an answer, and for a
    damaged answer.

    outputs: of the engine.  scope: as in `RecordingSession`.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], answers: Answers, scope: str = ""
    ) -> None:
        self.inputs, self.outputs, self._answers, self._scope = inputs, outputs, answers, scope

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The recorded answer to these inputs. Raises IntegrityError if there is none, or if it is damaged."""
        answer = self._answers.get(question(inputs, self._scope))
        if answer is None:
            remedy = "write the folder again with `enginesmith validate --carry`, and run the kit on it again"
            raise IntegrityError(f"the results file has no answer to these inputs; {remedy}")
        return {name: unpack(value) for name, value in answer.items()}


def record_answers(session: Session, golden: GoldenSet, answers: dict[str, dict[str, PackedArray]]) -> None:
    """Fill `answers` with the answers that `replay_session` needs for a proof: to the golden cases and, for a model
    with state, to its sequences with its own states. Raises the session's errors.
    """
    recorder = RecordingSession(session, answers)
    for case in golden.cases:
        run(recorder, case.inputs)
    if golden.sequences is not None:
        roll_session = FreeRunningSession(RecordingSession(session, answers, follow=True), golden.sequences)
        for case in golden.sequences.golden.cases:
            run(roll_session, case.inputs)


def replay_session(request: BuildRequest, answers: Answers, scope: str = "") -> Session:
    """A session that returns the recorded answers of an engine, for use in place of `discovery.open_engine`'s."""
    return ReplaySession(request.inputs, request.outputs, answers, scope)


def question(inputs: Tensors, scope: str = "") -> str:
    """The digest of inputs, which is the key of their answer. scope: as in `RecordingSession`."""
    hasher = hashlib.sha256(f"{scope}\0".encode() if scope else b"")
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name])
        hasher.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def pack(array: Array) -> PackedArray:
    """An array as text."""
    values = np.ascontiguousarray(array)
    base64_text = base64.b64encode(zlib.compress(values.tobytes(), 1)).decode()
    return PackedArray(values.dtype.str, array.shape, base64_text)


def unpack(value: PackedArray) -> Array:
    """Read what `pack` wrote. Raises IntegrityError for anything else."""
    try:
        dtype, shape = np.dtype(value.dtype), value.shape
        if dtype.kind not in _KINDS or dtype.hasobject or any(size < 0 for size in shape):
            raise ValueError(f"an array of {dtype}, {shape}")
        array_bytes = math.prod(shape) * dtype.itemsize
        if array_bytes > MAX_BYTES:
            raise ValueError(f"an array of {array_bytes} bytes")
        packed_bytes = base64.b64decode(value.data, validate=True)
        raw_bytes = zlib.decompressobj().decompress(packed_bytes, array_bytes + 1)
        if len(raw_bytes) != array_bytes:
            raise ValueError(f"{len(raw_bytes)} bytes instead of {array_bytes}")
    except (TypeError, ValueError, OverflowError, zlib.error) as error:
        raise IntegrityError(f"a recorded answer is damaged: {str(error)[:120]}") from error
    return np.frombuffer(raw_bytes, dtype).reshape(shape)
