"""Calibration: observing the samples, and searching with them what to quantize."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.errors import DataError, IntegrityError
from builders.types import QuantizationScheme, WeightLevels
from pipeline.jobs.blobs import dims_from, fetch, tensors_from, text_of
from pipeline.registry.store import Store, open_store
from pipeline.values import Activation, Json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builders.types import Tensors
    from pipeline.quantization.calibration.observations import Observations
    from pipeline.quantization.calibration.ranges import Ranges
    from pipeline.quantization.choice.engine_race import EngineRace
    from validation.samples import Samples, SampleSource


def observe_part(
    store: str,
    onnx: str,
    part: list[int],
    samples: Json,
    workdir: Path,
) -> Json:
    """One streaming pass over a part of the calibration samples: observations (blob), digest of what was seen, samples,
    and the digest of each of them (blob).

    part: its index, and of how many.  samples: root and data (the spec's folder, and what the spec names there), digest
    (of it when the step was keyed), labels (an array that no input takes), inputs and dims. Raises DataError when the
    data has changed since.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.observe import observe
    from pipeline.quantization.graphs.placement import tensors_to_measure
    from pipeline.quantization.graphs.sites import activations, prepared
    from validation.overlap import Noted
    from validation.samples import Samples

    place = open_store(store)
    model = fetch(place, onnx, workdir / "model.onnx")
    graph = prepared(onnx_package.load(model))
    everything, needed = activations(graph), tensors_to_measure(graph)
    del graph
    with _opened(samples) as source:
        index, count = part
        span = source.part(index, count) if isinstance(source, Samples) and count > 1 else (0, None)
        noted = Noted(source)
        seen = observe(model, noted, everything, histograms=needed, span=span)
    if seen.dataset != samples["digest"]:
        raise DataError(f"{samples['data']} changed while it was read; nothing was kept: run again")
    return _observations_value(place, seen, noted.seen)


def observe_part_there(store: str, onnx: str, part: list[int], samples: Json, workdir: Path) -> Json | None:
    """`observe_part` on a node that may not see the samples; None where it does not."""
    if not Path(samples["root"], samples["data"].partition(":")[0]).exists():
        return None
    return observe_part(store, onnx, part, samples, workdir)


def _opened(samples: Json) -> "AbstractContextManager[SampleSource]":
    from pipeline.quantization.calibration.sources import open_source

    shapes = tensors_from(samples["inputs"]), dims_from(samples["dims"])
    return open_source(Path(samples["root"]), samples["data"], samples["digest"], *shapes, samples["labels"])


def _classes(source: "Samples", samples: Json) -> "NDArray[Any]":
    found = source.column(samples["labels"])
    if found.dtype.kind not in "iu":
        where = f"{samples['labels']!r} of {samples['data']}"
        raise DataError(f"calibration.labels: {where} is {found.dtype}; class indices are integers")
    return found


def merge_parts(store: str, parts: list[str], inputs: list[str]) -> Json:
    """Observations of parts of one data set, and the samples' digests, both by digest, as one: the same four."""
    from functools import reduce

    from pipeline.quantization.calibration.observations import Observations
    from validation.overlap import merged

    place = open_store(store)
    found = [Observations.from_bytes(place.read_blob(digest), digest) for digest in parts]
    return _observations_value(place, reduce(Observations.merge, found), merged(map(place.read_blob, inputs)))


def _observations_value(place: Store, seen: "Observations", inputs: bytes) -> Json:
    blobs = {"observations": place.put_bytes(seen.to_bytes()), "inputs": place.put_bytes(inputs)}
    return {**blobs, "seen": seen.digest, "samples": seen.samples}


def choose(
    store: str,
    onnx: str,
    activation: Activation,
    weight_levels: WeightLevels,
    observations: str,
    calibration: Json,
    search: Json,
    race: Json | None,
    answer: str | None,
    samples: Json,
    workdir: Path,
) -> Json:
    """Search what to quantize and how: digests of model, ranges, choice and of what the smoothed activations hold, and
    the nodes left in float with reasons.

    activation, weight_levels: as in `QuantizationScheme`.  search: the spec's smoothing, floor and overrides.
    race: of `steps.race.engine_to_race`.  answer: the output that is judged by labels.  samples: as in `observe_part`.
    """
    import onnx as onnx_package

    from pipeline.quantization.calibration.observations import Observations
    from pipeline.quantization.choice.chosen import Floor
    from pipeline.quantization.choice.runs import Labels, grouped
    from pipeline.quantization.choice.search import choose as search_for
    from pipeline.quantization.graphs.sites import prepared
    from pipeline.quantization.schemes.overrides import Override, resolve
    from pipeline.sources.onnx_model import save_onnx
    from validation.samples import Samples

    place = open_store(store)
    model = onnx_package.load(fetch(place, onnx, workdir / "model.onnx"))
    scheme = QuantizationScheme(activation, activation == "uint8", "fp32", weight_levels)
    measured = chosen_ranges(
        place, {"precision": "int8", "scheme": {"activation": activation}}, observations, calibration
    )
    if measured is None:
        raise IntegrityError("int8 was to be searched without observations; calibrate first")
    rules = [Override.from_json(item) for item in search["overrides"]]
    overrides = resolve(prepared(model), rules) if rules else {}
    floor = Floor(**search["floor"]) if search["floor"] else None
    shapes = tensors_from(samples["inputs"]), dims_from(samples["dims"])
    with _opened(samples) as source:
        first = next(grouped(source.runs(), *shapes))[1] if race else {}
        labels = Labels(answer, _classes(source, samples)) if answer and isinstance(source, Samples) else None
        with _race(race, first, workdir) as timer:
            runs = grouped(source.runs(), *shapes)
            found = search_for(model, measured, scheme, runs, floor, search["smoothing"], overrides, timer, labels)
    save_onnx(found.model, workdir / "chosen.onnx")
    return {
        "model": place.put_file(workdir / "chosen.onnx"),
        "ranges": place.put_bytes(text_of(found.ranges.to_json())),
        "choice": place.put_bytes(text_of({**found.to_json(), "floor": search["floor"]})),
        "smoothed": place.put_bytes(Observations(onnx, samples["digest"], (), found.smoothed).to_bytes()),
        "left": dict(found.left),
        "summary": "; ".join(filter(None, [found.summary, _not_measured(race)])),
    }


def _race(wanted: Json | None, inputs: "Tensors", workdir: Path) -> "AbstractContextManager[EngineRace | None]":
    """The engines that measure what int8 saves, on the first run of the samples; none where there is nothing to run."""
    from builders import backends
    from builders.types import BuildRequest
    from pipeline.quantization.choice.engine_race import EngineRace

    if wanted is None or "cannot" in wanted:
        return nullcontext()
    request = BuildRequest.from_json(wanted["request"])
    return EngineRace(backends.configure(request.backend, dict(request.options)), request, inputs, workdir)


def _not_measured(race: Json | None) -> str:
    return f"latency was not measured: {race['cannot']}" if race and "cannot" in race else ""


def chosen_ranges(place: Store, flavour: Json, observations: str | None, calibration: Json | None) -> "Ranges | None":
    """Chosen for the flavour's scheme; fp8 and casts need to know the extremes only."""
    from pipeline.quantization.calibration.methods import MinMax, method, ranges
    from pipeline.quantization.calibration.observations import Observations

    if observations is None or calibration is None:
        return None
    seen = Observations.from_bytes(place.read_blob(observations))
    if flavour["precision"] != "int8":
        return ranges(seen, MinMax(), "int8")
    chosen = method(calibration["method"], calibration["percentile"])
    return ranges(seen, chosen, flavour["scheme"]["activation"])
