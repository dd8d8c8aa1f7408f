"""Calls of TensorRT's builder: the network, its profiles, the progress, the timing cache, the account of the layers.

Timing caches and the account of the layers are full TensorRT's; neither was run on a GPU.

A timing cache, what the tuner has measured on this GPU, is good for one product, driver and version of TensorRT; with
another it is an error to some releases (NVIDIA/TensorRT#2144) and useless to the rest. So caches are kept by these
three (`TimingCached.timing_place`), and one that TensorRT refuses all the same is left out, with a note. A cache makes
builds quicker and not reproducible (NVIDIA/TensorRT#4798): it is no part of a build key.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from builders.backends.optional_methods import GIVEN, GROWN
from builders.backends.tensorrt.words import clean, parser_reason
from enginesmith.core.errors import EnginesmithError, ModelError
from enginesmith.core.types import ShapeProfile, Untyped

_ASK_S = 0.2
_TELL_S = 2.0
MAX_BYTES = 64 << 20


def check_model(model: Path) -> None:
    """Raise ModelError when the ONNX checker refuses the model. TensorRT's parser accepts empty and garbage files."""
    import onnx

    try:
        onnx.checker.check_model(str(model))
    except Exception as error:  # the checker raises protobuf's, its own and the standard library's classes alike
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error


def parse_network(trt: Untyped, said: Untyped, builder: Untyped, model: Path, edition: tuple[str, str]) -> Untyped:
    """A strongly typed network of the model. edition: title and name of the backend, for errors.

    Raises ModelError naming node, operator and reason. The parser gets the path, so that it finds external data; for
    some files that it cannot use it returns True, so that its errors and the network are checked too.
    """
    # Strong typing is a choice in TensorRT 10. Later releases and RTX have nothing else and deprecate the flag.
    typed = trt.__version__.startswith("10.")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if typed else 0)
    parser = trt.OnnxParser(network, said)
    if not parser.parse_from_file(str(model)) or parser.num_errors:
        problems = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ModelError(parser_reason(*edition, problems))
    if network.num_layers == 0:
        raise ModelError(f"{edition[0]} found no operators in {model.name}; export it again")
    return network


def add_profiles(builder: Untyped, config: Untyped, profiles: Iterable[ShapeProfile]) -> None:
    """Add an optimization profile to `config` for each of `profiles`. One that TensorRT cannot use fails the build."""
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, low, best, high in shapes.inputs:
            profile.set_shape(name, low, best, high)
        config.add_optimization_profile(profile)


def has_profile(name: str, profiles: Iterable[ShapeProfile]) -> bool:
    """Whether there are profiles and each has shapes for this input."""
    found = [any(entry[0] == name for entry in shapes.inputs) for shapes in profiles]
    return bool(found) and all(found)


def monitor(trt: Untyped, asked_to_stop: Callable[[], bool], tell: Callable[[str], None]) -> Untyped:
    """An `IProgressMonitor` that tells the phases of a build and stops it when asked to. It must outlive the config.

    TensorRT calls it for every step of every phase, thousands of times a second in some, and a slow one slows the build
    (pytorch/TensorRT#3215). So a step costs one reading of the clock; the phase is told every `_TELL_S` and
    `asked_to_stop` is called every `_ASK_S`. Steps are not counted: they cover little of a build.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self._asked_at = self._told_at = 0.0
            self._phase = self._told = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self._phase = phase_name

        def phase_finish(self, phase_name: str) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:  # noqa: ARG002
            now = time.monotonic()
            if now - self._asked_at >= _ASK_S:
                self._asked_at = now
                self.stopped = self.stopped or asked_to_stop()
                if self._phase != self._told and now - self._told_at >= _TELL_S:
                    self._told, self._told_at = self._phase, now
                    tell(f"compiling: {self._phase[:80].lower()}")
            return not self.stopped

    return Monitor()


def use_given(config: Untyped, workdir: Path) -> list[tuple[str, str]]:
    """Give the tuner WORKDIR/timing.cache, else an empty cache to fill; (severity, text) of a warning if TensorRT does
    not take that file."""
    path = workdir / GIVEN
    data = path.read_bytes() if path.is_file() else b""
    reason = _set(config, data)
    if not (data and reason):
        return []
    _set(config, b"")
    return [("WARNING", f"the timing cache of this GPU was left out, and begun anew: {reason}")]


def keep_grown(config: Untyped, workdir: Path) -> None:
    """Write the tuner's cache, grown by this build, to WORKDIR/timing.grown."""
    cache = config.get_timing_cache()
    if cache is not None:
        (workdir / GROWN).write_bytes(bytes(cache.serialize()))


def merge_caches(trt: Untyped, logger: Untyped, older: bytes, newer: bytes) -> bytes:
    """One cache with the content of both. Raises EnginesmithError when TensorRT does not merge them."""
    config = trt.Builder(logger).create_builder_config()
    first = config.create_timing_cache(older)
    second = config.create_timing_cache(newer)
    if first is None or second is None or not first.combine(second, False):
        raise EnginesmithError("TensorRT does not merge these timing caches; the newer one alone is kept")
    return bytes(first.serialize())


def _set(config: Untyped, data: bytes) -> str:
    """Why TensorRT does not take `data` as the timing cache; '' when it does."""
    try:
        cache = config.create_timing_cache(data)
        taken = cache is not None and config.set_timing_cache(cache, False)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "" if taken else "TensorRT refuses it (another version, GPU or driver, or damaged)"


def kept_layers(
    trt: Untyped, said: Untyped, engine: Path, prepare: Callable[[Untyped], None]
) -> tuple[Path | None, str]:
    """The engine inspector's JSON in a file beside the engine (names, types, formats, tactics), or why there is none.

    The inspector needs a loaded engine, hence the GPU, and room on it beside what the builder still holds. An engine is
    as good without it, so that a failure is a reason and no error. prepare: called with the runtime first.
    """
    before = len(said.messages)
    runtime = trt.Runtime(said)
    prepare(runtime)
    runtime.engine_host_code_allowed = True  # it was built in this process
    loaded = runtime.deserialize_cuda_engine(engine.read_bytes())
    inspector = loaded and loaded.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON) if inspector else ""
    heard = [clean(words) for level, words in said.messages[before:] if "ERROR" in level]
    del said.messages[before:]
    if not text:
        return None, "; ".join(dict.fromkeys(heard)) or "TensorRT tells nothing"
    if len(text) > MAX_BYTES:
        return None, f"it takes {len(text)} bytes; the limit is {MAX_BYTES}"
    try:
        document = json.loads(text)
    except ValueError as error:
        return None, f"TensorRT's JSON cannot be read: {error}"
    path = engine.with_name("layers.json")
    path.write_text(json.dumps(document, sort_keys=True))
    return path, ""
