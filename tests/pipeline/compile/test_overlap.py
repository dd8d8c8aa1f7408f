from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.types import Dim, TensorSpec
from tests.pipeline.projects import Project, answers, arrays, units, weights
from validation.data.generated import GeneratedSamples
from validation.data.joined import DigestCollector, golden_digests, merge_digests, overlap_check
from validation.data.samples import Samples

X = (TensorSpec("x", "float32", ("batch", 8)),)
BATCH = (Dim("batch", 1, 4, 8),)


def samples(folder: Path, name: str, x: np.ndarray) -> Samples:
    np.savez(folder / f"{name}.npz", x=x)
    return Samples.open(folder / f"{name}.npz", X, BATCH)


def passed(source: Samples | GeneratedSamples) -> bytes:
    noted_collector = DigestCollector(source)
    assert list(noted_collector.runs())
    return noted_collector.seen


@pytest.mark.parametrize(("shared", "share"), [(0, 0.0), (6, 0.5), (7, 7 / 12), (12, 1.0)])
def test_the_share_of_golden_samples_in_calibration_is_reported(tmp_path: Path, shared: int, share: float) -> None:
    rng = np.random.default_rng(0)
    golden, other_array = rng.normal(size=(12, 8)).astype("f"), rng.normal(size=(20, 8)).astype("f")
    calibration = samples(tmp_path, "calibration", np.concatenate([other_array, golden[:shared][::-1]]))
    actual = samples(tmp_path, "golden", golden)
    check = overlap_check(golden_digests(actual.batches(), actual.complete), passed(calibration))
    assert check.value == share and check.passed == (share <= 0.5)
    assert ("give golden.data other ones" in check.note) == (share > 0.5)


def test_every_way_to_store_the_same_samples_is_recognized(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 8)).astype("f")
    grouped_samples, complete = samples(tmp_path, "grouped", x), samples(tmp_path, "complete", x[:, None])
    generated_samples = [
        GeneratedSamples(lambda items=items: items, "made", "0" * 64, X, BATCH)
        for items in ([{"x": row} for row in x], [{"x": x}], [{"x": x[:3]}, {"x": x[3:]}])
    ]
    for golden in (grouped_samples, complete):
        digests = golden_digests(golden.batches(), golden.complete)
        for source in (grouped_samples, complete, *generated_samples):
            assert overlap_check(digests, passed(source)).value == 1.0
    noted_collector = DigestCollector(grouped_samples)
    parts = [DigestCollector(grouped_samples), DigestCollector(grouped_samples)]
    assert list(noted_collector.runs()) and list(parts[0].runs(0, 3)) and list(parts[1].runs(3))
    assert merge_digests(part.seen for part in parts) == noted_collector.seen


def test_tokens_shared_by_two_sequences_are_no_overlap(tmp_path: Path) -> None:
    tokens = (TensorSpec("x", "int64", ("length",)),)
    dims = (Dim("length", 1, 4, 8),)
    items = []
    for name, x in (("a", [[1, 2, 3], [2, 3, 1]]), ("b", [[3, 2, 1], [1, 3, 2]])):
        np.savez(tmp_path / f"{name}.npz", x=np.array(x))
        items.append(Samples.open(tmp_path / f"{name}.npz", tokens, dims))
    check = overlap_check(golden_digests(items[0].batches(), items[0].complete), passed(items[1]))
    assert check.value == 0 and check.passed


@pytest.mark.parametrize("parts", [1, 2])
def test_a_golden_set_of_calibration_samples_fails_the_calibrated_engines(project: Project, parts: int) -> None:
    x = arrays(project.folder / "calibration.npz")["x"]
    np.savez(project.folder / "golden.npz", x=x[::-1], label=answers(weights(), x[::-1]).argmax(-1))
    project.change_spec(targets=["cpu"], calibration={"data": "calibration.npz", "parts": parts})
    result = project.build()
    assert result.code == 1 and units(result.json, "status") == {"cpu fp32": "proven", "cpu int8": "failed"}
    reason = units(result.json, "reason")["cpu int8"]
    assert reason.startswith(
        "quantization calibration overlap at golden: 1, limit 0.5 (all of the 64 golden samples are"
    )
    assert "give golden.data other ones" in reason and reason.partition("; 100.0 %")[0] in result.err
    assert "attribute" not in result.err
