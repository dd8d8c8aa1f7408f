"""What a session answers to the calls of its proof, as text that travels to another machine, to be judged there.

Answers are kept by the digest of the inputs (names, types, shapes and bytes), so that none counts for other inputs;
each is the bytes of the array, packed by zlib, in base64. A model with state is followed through its sequences in the
same way: what it answered to a step gives the inputs of the next one.
"""

import base64
import hashlib
import math
import zlib
from collections.abc import Collection, Sequence

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import IntegrityError
from enginesmith.core.reports.proof import Answers, Check, PackedArray
from enginesmith.core.types import BuildRequest, Session, Tensors, TensorSpec
from validation.comparison.sessions import expected_checks, run
from validation.golden.free_running import FreeRunningSession
from validation.golden.golden_set import GoldenSet
from validation.limits.budget import budgets

# Bytes of one unpacked array at most: a small text could unpack to more than memory holds.
MAX_BYTES = 256 << 20
_KINDS = "biuf"


class RecordingSession(Session):
    """A session that keeps the first answer to each call, in `answers`.

    only: names of the outputs to keep; default: all.  scope: whose answers these are, where several sessions' are kept
    together.  follow: whether a call that was answered before gets that answer,
    so that a sequence goes on from what is on record where a device does not repeat its bits.
    """

    def __init__(
        self,
        session: Session,
        answers: dict[str, dict[str, PackedArray]] | None = None,
        only: Collection[str] | None = None,
        follow: bool = False,
        scope: str = "",
    ) -> None:
        self.inputs: Sequence[TensorSpec] = session.inputs
        self.outputs: Sequence[TensorSpec] = session.outputs
        self.answers = {} if answers is None else answers
        self._session, self._only, self._follow, self._scope = session, only, follow, scope

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """Run, and keep the outputs."""
        asked = question(inputs, self._scope)
        if self._follow and asked in self.answers:
            return {name: unpack(value) for name, value in self.answers[asked].items()}
        found, only = self._session.run(inputs), self._only
        kept = {name: array for name, array in found.items() if only is None or name in only}
        self.answers.setdefault(asked, {name: pack(array) for name, array in kept.items()})
        return found


class ReplaySession(Session):
    """A session that gives recorded answers. Running it raises IntegrityError for inputs without an answer, and for a
    damaged answer."""

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], answers: Answers, scope: str = ""
    ) -> None:
        self.inputs, self.outputs, self._answers, self._scope = inputs, outputs, answers, scope

    def run(self, inputs: Tensors) -> dict[str, Array]:
        """The answer that was recorded for these inputs."""
        found = self._answers.get(question(inputs, self._scope))
        if found is None:
            raise IntegrityError(
                "no answer to it was recorded; carry the version anew, and run the kit with that folder"
            )
        return {name: unpack(value) for name, value in found.items()}


def record_proof(
    session: Session, request: BuildRequest, golden: GoldenSet, answers: dict[str, dict[str, PackedArray]]
) -> tuple[Check, ...]:
    """Make the calls that `replay_session` answers at a proof: the golden cases, the sequences of a model with state on
    its own states. The checks are those of the golden cases. answers: is filled.

    Raises what the session raises.
    """
    fresh = RecordingSession(session, answers)
    checks = expected_checks("engine", fresh, golden, budgets("quantization", request.precision, None))
    if golden.sequences is not None:
        rolled = FreeRunningSession(RecordingSession(session, answers, follow=True), golden.sequences)
        for case in golden.sequences.golden.cases:
            run(rolled, case.inputs)
    return checks


def replay_session(request: BuildRequest, answers: Answers, scope: str = "") -> Session:
    """The engine of a request as `compatibility.open_engine` opens it, with the answers that were recorded of it."""
    return ReplaySession(request.inputs, request.outputs, answers, scope)


def question(inputs: Tensors, scope: str = "") -> str:
    """The digest of inputs, by which their answer is kept. scope: as in `RecordingSession`."""
    digest = hashlib.sha256(f"{scope}\0".encode() if scope else b"")
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name])
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def pack(array: Array) -> PackedArray:
    """An array as text."""
    whole = np.ascontiguousarray(array)
    data = base64.b64encode(zlib.compress(whole.tobytes(), 1)).decode()
    return PackedArray(whole.dtype.str, array.shape, data)


def unpack(value: PackedArray) -> Array:
    """Read what `pack` wrote. Raises IntegrityError for anything else."""
    try:
        dtype, shape = np.dtype(value.dtype), value.shape
        if dtype.kind not in _KINDS or dtype.hasobject or any(size < 0 for size in shape):
            raise ValueError(f"an array of {dtype}, {shape}")
        wanted = math.prod(shape) * dtype.itemsize
        if wanted > MAX_BYTES:
            raise ValueError(f"an array of {wanted} bytes")
        packed = base64.b64decode(value.data, validate=True)
        data = zlib.decompressobj().decompress(packed, wanted + 1)
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes where {wanted} belong")
    except (TypeError, ValueError, OverflowError, zlib.error) as error:
        raise IntegrityError(f"a recorded answer is damaged: {str(error)[:120]}") from error
    return np.frombuffer(data, dtype).reshape(shape)
