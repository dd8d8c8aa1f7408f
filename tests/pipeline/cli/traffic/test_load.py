"""`enginesmith load` against a real server's process, its record, and bad input."""

import json

import numpy as np
import pytest

from enginesmith.core.errors import IntegrityError
from enginesmith.core.names import parse_reference
from enginesmith.exchange.mirror import mirror
from enginesmith.registry.evidence.loads import attach_load, load_reports
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import load
from tests.pipeline.projects import Project

WORDS = ("load", "tiny", "--target", "cpu", "--precision", "fp32")


def test_a_load_test_is_measured_recorded_and_in_the_report(built: Project) -> None:
    done = built.run(*WORDS, "--rate", 60, "--seconds", 4, "--burst", 3, "--burst-every", 2, "--burst-seconds", 1,
                     "--record", "--json")  # fmt: skip
    assert done.code == 0, done.err
    parts = ["timing what the server adds", "starting a server", "sending for 4 s"]
    assert [done.err.index(part) for part in parts] == sorted(done.err.index(part) for part in parts)
    found = done.json
    assert [phase["name"] for phase in found["phases"]] == ["quiet", "burst"]
    quiet, burst = found["phases"]
    assert quiet["requests"] + burst["requests"] == pytest.approx(480, rel=0.25)
    assert burst["offered"] > 2 * quiet["offered"] and not quiet["unanswered"] and not burst["failed"]
    assert found["cold_start_s"] > found["first_s"] > 0 and found["memory"]["peak"] >= found["memory"]["start"] > 1e6
    assert found["server"]["request_s"] > 0 and found["server"]["batch_s"] >= 0
    assert quiet["slowest_s"] > 0 and found["batch"] >= 1 and not found["interrupted"]
    store = open_store(str(built.registry))
    manifest = load(store, "tiny", "1")
    (report,) = load_reports(store, manifest)
    assert report.engine == found["engine"] and report.terms.burst == 3
    assert built.run("show", "tiny", "--json").json["loads"][0]["terms"]["burst"] == 3
    shown = built.run("show", "tiny").out
    assert "load test on" in shown and "60 requests a second, poisson, 3 times as many for 1 of 2 s" in shown
    assert built.run("registry", "fsck", "tiny").code == 0
    page = built.folder / "page.html"
    assert built.run("report", "tiny", "--out", page).code == 0 and "<h2>Load</h2>" in page.read_text()


def test_recorded_requests_are_sent(built: Project) -> None:
    path = built.folder / "traffic.jsonl"
    rng = np.random.default_rng(0)
    path.write_text(
        "\n".join(json.dumps({"at": 0.1 * at, "inputs": {"x": rng.normal(size=(2, 8)).tolist()}}) for at in range(20))
    )
    done = built.run(*WORDS, "--rate", 40, "--seconds", 2, "--traffic", path, "--json", "--quiet")
    assert done.code == 0 and done.err == ""
    assert done.json["terms"]["arrivals"] == "recorded" and done.json["phases"][0]["requests"] >= 70
    sized = built.run(*WORDS, "--rate", 40, "--traffic", path, "--at", "batch=1")
    assert sized.code == 2 and "leave out --at" in sized.err
    both = built.run(*WORDS, "--rate", 40, "--seconds", 2, "--traffic", path, "--burst", 2)
    assert both.code == 2 and "leave out --burst" in both.err


def test_requests_of_another_model_or_beyond_the_dims_are_refused_before_a_server_starts(built: Project) -> None:
    path = built.folder / "traffic.jsonl"
    lines = [json.dumps({"at": 0.1 * at, "inputs": {"x": [[0.0] * 8] * (99 if at == 3 else 2)}}) for at in range(20)]
    path.write_text("\n".join(lines))
    beyond = built.run(*WORDS, "--rate", 40, "--traffic", path)
    assert beyond.code == 2 and "1 of 20 requests are beyond the dims" in beyond.err and "batch=99" in beyond.err
    path.write_text("\n".join(['{"kind": "enginesmith-traffic", "format": 1, "model": "other"}', *lines]))
    other = built.run(*WORDS, "--rate", 40, "--traffic", path)
    assert other.code == 2 and "is traffic of 'other', and this is 'tiny'" in other.err


def test_a_report_is_of_an_engine_of_the_version_and_as_it_was_written(built: Project, tmp_path) -> None:
    assert built.run(*WORDS, "--rate", 30, "--seconds", 1, "--record").code == 0
    store = open_store(str(built.registry))
    manifest = load(store, "tiny", "1")
    (key,) = list(store.list("models/tiny/versions/1/loads/"))
    data = store.read(key) or b""
    other = store.put_bytes(data.replace(key.split("/")[5].encode(), b"0" * 64))
    with pytest.raises(IntegrityError, match="which tiny@1 does not have"):
        attach_load(store, manifest, other)
    with pytest.raises(IntegrityError, match="is no load report"):
        attach_load(store, manifest, store.put_bytes(b"{}"))
    copy = open_store(str(tmp_path / "copy"), create=True)
    mirror(store, [parse_reference("tiny@1")], copy)
    assert len(list(load_reports(copy, manifest))) == 1
    (built.registry / key).write_bytes(data.replace(b'"interrupted":false', b'"interrupted":true'))
    assert built.run("registry", "fsck", "tiny").code == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "give --rate"),
        (("--rate", 0), "is not in the range"),
        (("--rate", "nan"), "nan is not a finite number"),
        (("--rate", 10, "--seconds", "nan"), "nan is not a finite number"),
        (("--rate", 10, "--batch", 99), "takes 8 samples at most"),
        (("--rate", 10, "--at", "length=3"), "the model has no dim 'length'"),
        (("--rate", 10, "--at", "batch=4"), "a request has one sample, and the batcher joins them"),
        (("--rate", 900000, "--seconds", 60), "requests are too many"),
        (("--rate", 10, "--burst", 2, "--burst-seconds", 10), "leave nothing between"),
        (("--rate", 0.001, "--seconds", 1), "are no request; give more seconds"),
    ],
)
def test_bad_input_is_told(built: Project, words: tuple[object, ...], wanted: str) -> None:
    done = built.run(*WORDS, *words)
    assert done.code == 2 and wanted in done.err, done.err


def test_a_generation_that_is_not_here_is_refused(built: Project) -> None:
    done = built.run("load", "tiny", "--target", "sm_89", "--rate", 1)
    assert done.code == 2 and "does not run here" in done.err
