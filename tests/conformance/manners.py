"""How sessions behave with what does not fit, and whether they keep their hands off what is not theirs.

Each check is a function of an open session that yields complaints; none means that the session keeps the promise.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from builders.backends.discovery import check_compatible
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.types import Backend, Dim, Engine, Session, Target
from pipeline.sources.onnx_model import specs_of
from tests.conformance.torture.graph import model, noise
from tests.conformance.trial import answer_reason, fresh, request_for
from tests.waiting import run_threads

DIMS = (Dim("n", 2, 4, 6),)
_W = noise(1, 4, 3)


def graph() -> onnx.ModelProto:
    """x [n, 4] float32, ids [n] int64, k scalar float32 -> y [n, 3] float32, doubled [n] int64."""
    return model(
        "g (float[n, 4] x, int64[n] ids, float k) => (float[n, 3] y, int64[n] doubled) "
        "{ m = MatMul(x, w) y = Mul(m, k) doubled = Add(ids, ids) }",
        {"w": _W},
    )


def inputs(size: int, seed: int = 0) -> dict[str, Any]:
    ids = np.random.default_rng(seed).integers(-9, 9, size)
    return {"x": noise(seed, size, 4), "ids": ids, "k": np.array(1.5, "f")}


def right(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"y": (inputs["x"] @ _W) * inputs["k"], "doubled": inputs["ids"] * 2}


def built(backend: Backend, target: Target, workdir: Path) -> Engine:
    """The graph as an engine. Raises what the backend raises."""
    folder = fresh(workdir / "manners")
    path = folder / "model.onnx"
    onnx.save(graph(), path)
    return backend.build(request_for(backend, target, (path, *specs_of(graph())), DIMS), path, folder)


def complaints(backend: Backend, target: Target, workdir: Path) -> Iterator[str]:
    """Every broken promise of the sessions of a backend whose engines run here."""
    engine = built(backend, target, workdir)
    check_compatible(backend, engine)
    for check in (*map(_opened, CHECKS), two_at_once, takes_two_threads, after_its_end):
        try:
            for complaint in check(backend, engine):
                yield f"{check.__name__}: {complaint}"
        except Exception as error:  # whatever a session raises that it should not is a complaint
            yield f"{check.__name__}: raises {type(error).__name__}: {error}"


def _opened(check: Callable[[Session], Iterator[str]]) -> Callable[[Backend, Engine], Iterator[str]]:
    @wraps(check)
    def run(backend: Backend, engine: Engine) -> Iterator[str]:
        with backend.open(engine) as session:
            yield from check(session)

    return run


def refuses_what_does_not_fit(session: Session) -> Iterator[str]:
    """Wrong names, dtypes and shapes are a DataError, and the session then goes on."""
    fitting_inputs = inputs(4)
    for label, arguments in misfits(fitting_inputs).items():
        try:
            answer = session.run(arguments)
        except DataError as error:
            if not str(error).strip():
                yield f"{label}: a DataError without a word"
        except Exception as error:
            yield f"{label}: raises {type(error).__name__} instead of DataError: {error}"
        else:
            yield f"{label}: was answered, with { ({name: np.shape(value) for name, value in answer.items()}) }"
        if reason := _wrong(session, fitting_inputs):
            yield f"after {label}: {reason}"


def misfits(fits: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Inputs that do not fit, by what is wrong with them."""
    x, ids = fits["x"], fits["ids"]

    def changed(**other: Any) -> dict[str, Any]:
        return {**fits, **other}

    return {
        "nothing": {},
        "an input missing": {"x": x, "ids": ids},
        "an input too many": changed(z=x),
        "a name of other case": {"X": x, "ids": ids, "k": fits["k"]},
        "an output's name": {"y": x, "ids": ids, "k": fits["k"]},
        "float64": changed(x=x.astype("float64")),
        "float16": changed(x=x.astype("float16")),
        "int32 for int64": changed(ids=ids.astype("int32")),
        "uint64 for int64": changed(ids=ids.astype("uint64")),
        "float for int64": changed(ids=ids.astype("float32")),
        "bool for float": changed(x=x > 0),
        "complex": changed(x=x.astype("complex64")),
        "objects": changed(x=x.astype(object)),
        "the other order of bytes": changed(x=x.astype(">f4")),
        "a rank too few": changed(x=x[:, 0]),
        "a rank too many": changed(x=x[None]),
        "a fixed size too large": changed(x=np.zeros((4, 5), "f")),
        "a fixed size too small": changed(x=np.zeros((4, 3), "f")),
        "transposed": changed(x=np.zeros((4, 4), "f")[:, :3].T.copy()),
        "one dim with two sizes": changed(ids=ids[:3]),
        "a vector for a scalar": changed(k=np.array([1.5], "f")),
        "a list": changed(x=x.tolist()),
        "a number": changed(k=1.5),
        "None": changed(x=None),
    }


def answers_within_its_profile_alone(session: Session) -> Iterator[str]:
    """Outside of the profile (2 to 6) it refuses, or answers rightly; never otherwise."""
    for size in (2, 3, 4, 5, 6):
        if reason := _wrong(session, inputs(size)):
            yield f"size {size}: {reason}"
    for size in (0, 1, 7, 64):
        with suppress(DataError):
            if reason := answer_reason(session.run(inputs(size)), right(inputs(size)), "fp32"):
                yield f"size {size}, outside of the profile: {reason}"


def takes_arrays_however_they_lie(session: Session) -> Iterator[str]:
    """Strided, reversed, Fortran-ordered, read-only, unaligned: the same answer."""
    fitting_inputs = inputs(4)
    wide_array = np.zeros((8, 8), "f")
    wide_array[::2, ::2] = fitting_inputs["x"]
    frozen_input = fitting_inputs["x"].copy()
    frozen_input.setflags(write=False)
    unaligned = np.zeros(fitting_inputs["x"].nbytes + 1, "uint8")[1:].view("f").reshape(4, 4)
    unaligned[:] = fitting_inputs["x"]
    kinds = {
        "strided": wide_array[::2, ::2],
        "in Fortran's order": np.asfortranarray(fitting_inputs["x"]),
        "reversed": np.ascontiguousarray(fitting_inputs["x"][::-1])[::-1],
        "read-only": frozen_input,
        "unaligned": unaligned,
        "repeated": np.broadcast_to(fitting_inputs["x"][:1], (4, 4)),
    }
    for kind, array in kinds.items():
        if reason := _wrong(session, {**fitting_inputs, "x": array}):
            yield f"{kind}: {reason}"


def minds_its_own_memory(session: Session) -> Iterator[str]:
    """Inputs stay as they are; an answer stays as it is when another is asked for, and may be written to."""
    first_inputs, second_inputs = inputs(4, 1), inputs(4, 2)
    arrays_before = {name: array.copy() for name, array in first_inputs.items()}
    answer = session.run(first_inputs)
    first_answer = {name: array.copy() for name, array in answer.items()}
    if any(not np.array_equal(first_inputs[name], arrays_before[name]) for name in arrays_before):
        yield "it wrote to its inputs"
    for name in first_inputs:
        first_inputs[name][...] = 0
    session.run(second_inputs)
    if any(not np.array_equal(answer[name], first_answer[name]) for name in first_answer):
        yield "an answer changed when its inputs did, or when the next was asked for"
    for name, array in answer.items():
        if not array.flags.writeable:
            yield f"answer {name!r} is read-only"
    if reason := _wrong(session, second_inputs):
        yield f"in the end: {reason}"


def reads_what_lies_in_its_inputs(session: Session) -> Iterator[str]:
    """Arrays that a caller fills anew before each call are other inputs."""
    buffers = inputs(4, 1)
    for seed in (1, 2, 1):
        for name, array in inputs(4, seed).items():
            buffers[name][...] = array
        if reason := _wrong(session, buffers):
            yield f"arrays that were filled anew: {reason}"


def says_the_same_again(session: Session) -> Iterator[str]:
    """The same inputs, the same bits, whatever was asked in between."""
    fitting_inputs = inputs(5)
    first_outputs = session.run(fitting_inputs)
    session.run(inputs(3))
    second_outputs = session.run(fitting_inputs)
    if any(first_outputs[name].tobytes() != second_outputs[name].tobytes() for name in first_outputs):
        yield "other bits for the same inputs"


def prepares_its_runtimes_own_call(session: Session) -> Iterator[str]:
    """Its runtime's own call, where it gives one, can be called again; it is refused for an incompatible engine."""
    call = session.prepare_call(inputs(4))
    if call is None:
        return
    for _ in range(3):
        call()
    if reason := _wrong(session, inputs(5)):
        yield f"after its runtime's own calls: {reason}"
    try:
        session.prepare_call({**inputs(4), "x": np.zeros((4, 5), "f")})
    except DataError:
        return
    yield "it prepares a call on inputs that do not fit"


def works_in_another_thread(session: Session) -> Iterator[str]:
    """What is opened in one thread is used in another."""
    items: list[str] = []

    def use() -> None:
        try:
            items.extend(filter(None, [_wrong(session, inputs(4))]))
        except Exception as error:
            items.append(f"raises {type(error).__name__}: {error}")

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    yield from items


def two_at_once(backend: Backend, engine: Engine) -> Iterator[str]:
    """Two sessions of one engine do not share what they compute."""
    with backend.open(engine) as first_file, backend.open(engine) as second_file:
        first_inputs, second_inputs = inputs(4, 1), inputs(6, 2)
        early_result = first_file.run(first_inputs)
        if reason := _wrong(second_file, second_inputs):
            yield f"the second of two sessions: {reason}"
        if reason := answer_reason(early_result, right(first_inputs), "fp32"):
            yield f"the first of two sessions, after the second ran: {reason}"


def takes_two_threads(backend: Backend, engine: Engine) -> Iterator[str]:
    """Calls that overlap are answered as any other, in the first thread and in others: 32 pairs that begin together."""
    if not backend.capabilities.thread_safe:
        return
    joint_barrier, errors = threading.Barrier(2, timeout=60), list[str]()

    def use(session: Session, seed: int) -> None:
        for _ in range(32):
            joint_barrier.wait()
            try:
                errors.extend(filter(None, [_wrong(session, inputs(4 + seed, seed))]))
            except Exception as error:
                errors.append(f"raises {type(error).__name__}: {error}")

    with backend.open(engine) as session:
        if reason := _wrong(session, inputs(4)):
            yield f"before there are threads: {reason}"
        run_threads(partial(use, session, seed) for seed in (1, 2))
    if errors:
        yield f"two threads that call at the same time: {len(errors)} of 64 calls: {errors[0]}"


def after_its_end(backend: Backend, engine: Engine) -> Iterator[str]:
    """A session that was closed says so."""
    with backend.open(engine) as session:
        session.run(inputs(4))
    try:
        session.run(inputs(4))
    except EnginesmithError:
        return
    except Exception as error:
        yield f"a closed session raises {type(error).__name__} instead of EnginesmithError: {error}"
        return
    yield "a closed session answers"


def _wrong(session: Session, inputs: Mapping[str, Any]) -> str | None:
    return answer_reason(session.run(inputs), right(inputs), "fp32")


CHECKS: tuple[Callable[[Session], Iterator[str]], ...] = (
    refuses_what_does_not_fit,
    answers_within_its_profile_alone,
    takes_arrays_however_they_lie,
    minds_its_own_memory,
    reads_what_lies_in_its_inputs,
    says_the_same_again,
    prepares_its_runtimes_own_call,
    works_in_another_thread,
)
