"""Engines are timed by a build, once for each kind of machine; what was measured is attached, shown and asked again."""

import json
import re
from contextlib import nullcontext
from typing import NoReturn

import pytest

from builders.execution.jobs import Job
from enginesmith.core.codec import encode
from enginesmith.core.errors import InputError, IntegrityError, ModelError
from enginesmith.core.names import parse_reference
from enginesmith.core.types import Dim, Target
from enginesmith.registry.evidence.latencies import attach_latency, latencies
from enginesmith.registry.versions.lookup import load
from pipeline.canary.engines import choose
from pipeline.compile.publication.pages import published_document
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.keys import time_engine
from pipeline.operations.check_reproducible import ProfileOptions, benchmark_pair, profile_published
from pipeline.operations.validate import spec_of
from pipeline.orchestration.run import NotOnRecord
from pipeline.outcome import engine_of
from pipeline.spec.validation import Latency
from tests.pipeline.compile.test_steps import Answering
from tests.pipeline.projects import Project, raising
from tests.validation.latency.reports import latency_report
from validation.latency.formatting import list_remarks
from validation.latency.measurement.loop import parse_sizes, sizes_of_buckets

QUICK = {"seconds": 0.005}


@pytest.mark.slow
def test_a_build_times_local_engines_and_a_second_one_does_nothing(project: Project) -> None:
    project.change_spec(targets=["cpu", "sm_89"], precisions=["fp32"], validation={"latency": QUICK})
    result = project.build()
    assert result.code == 0 and "latency cpu fp32 onnxruntime: done" in result.err and "latency sm_89" not in result.err
    store, manifest = project.published()
    ((engine, (report,)),) = latencies(store, manifest).items()
    assert engine == manifest.engines[0].digest and report.unit == "cpu fp32 onnxruntime"
    assert [bucket.sizes["batch"] for bucket in report.buckets] == [1, 4, 8]
    for bucket in report.buckets:
        assert bucket.runs >= 6 and bucket.items_per_s > 0 and bucket.memory_bytes > 0
        assert bucket.runtime and bucket.runtime.low and bucket.runtime.value
        assert 0 < bucket.runtime.low <= bucket.runtime.value and len(bucket.process_medians_s) == 5
    assert report.processes == 5 and report.import_s and report.import_s > 0
    assert report.load_s > 0 and report.anatomy.graph.macs == 4 * (8 * 16 + 16 * 10)
    # Nothing but overhead bounds so small a model; on a machine that others use the limits may not be known.
    assert report.anatomy.diagnosis and report.anatomy.diagnosis.bound in ("overhead", None)
    shown = project.run("show", "tiny")
    assert "latency on" in shown.out and re.search(r"(overhead-bound.*|no diagnosis) at batch=4", shown.out)
    # How many runs there were, and what else the machine did, is the machine's: what is to be said of it is shown.
    assert all(f"\n  {remark}\n" in shown.out for remark in list_remarks(report, ("p50", "p99")))
    assert "p99.9" not in shown.out
    page = project.page()
    assert "<h2>Latency</h2>" in page

    second_build = project.build()
    assert second_build.json["cached"] and "latency cpu fp32 onnxruntime: cached" in second_build.err
    # How long engines are timed changes nothing about what they are.
    project.change_spec(validation={})
    assert project.build().json["version"] == "1"
    validated_result = project.run("validate", "tiny", "--target", "cpu", "--json")
    assert validated_result.json["engines"][0]["latency"] is not None
    assert len(list(store.list("models/tiny/versions/1/latency/"))) == 2
    assert len(latencies(store, manifest)[engine]) == 1
    today_document = published_document(store, manifest)
    assert encode(today_document.latencies) == encode(latencies(store, manifest)) != encode({engine: [report]})

    (project.registry / next(iter(store.list("models/tiny/versions/1/latency/")))).write_text('{"format": 1}')
    assert project.run("registry", "fsck").code == 1


def test_timed_sizes_equal_the_specs() -> None:
    dims = (Dim("batch", 1, 4, 16, (4, 16)), Dim("length", 8, 8, 32))
    assert sizes_of_buckets(dims[:1], "few") == [{"batch": 1}, {"batch": 4}, {"batch": 16}]
    assert sizes_of_buckets((), "few") == [{}]
    all_sizes = sizes_of_buckets(dims, "all")
    assert {sizes["batch"] for sizes in all_sizes} == {1, 4, 5, 16} and len(all_sizes) == 8
    assert parse_sizes("length=32", dims) == {"batch": 4, "length": 32}
    for text, why in (("b=2", "no dim 'b'"), ("batch", "NAME="), ("batch=1,batch=2", "NAME="), ("batch=17", "1..16")):
        with pytest.raises(InputError, match=why):
            parse_sizes(text, dims)


def test_a_report_about_another_engine_is_refused(built: Project) -> None:
    store = built.store
    blob = store.put_bytes(json.dumps(encode(latency_report(engine="0" * 64))).encode())
    with pytest.raises(IntegrityError, match="which tiny@1 does not have"):
        attach_latency(store, load(store, "tiny", "1"), blob)
    with pytest.raises(IntegrityError, match="not a latency report"):
        attach_latency(store, load(store, "tiny", "1"), store.put_bytes(b"{}"))


def test_engines_are_timed_one_at_a_time(built: Project) -> None:
    store, jobs = built.store, []

    def note(job: Job) -> NoReturn:
        jobs.append(job)
        raise NotOnRecord(job.name)

    context = RunContext(store, Answering(note), Answering(note))
    choice = choose(store, parse_reference("tiny"), Target("cpu"), "fp32")
    spec, golden = spec_of(choice.manifest), choice.manifest.sources["golden"]
    for timed_function in (
        lambda: profile_published(choice, ProfileOptions(), context),
        lambda: benchmark_pair(choice, choice, ProfileOptions(), context),
        lambda: time_engine(engine_of(choice.entry), Latency(), golden, Work(spec, context), afresh=True),
    ):
        with pytest.raises(NotOnRecord):
            timed_function()
    assert [job.needs.alone for job in jobs] == [True] * 3


@pytest.mark.parametrize("error", [IntegrityError("it is damaged"), ModelError("it does not run")])
def test_an_untimeable_engine_stops_nothing_and_a_damaged_blob_does(built: Project, error: Exception) -> None:
    store, item = built.store, Answering(raising(error))
    choice = choose(store, parse_reference("tiny"), Target("cpu"), "fp32")
    work = Work(spec_of(choice.manifest), RunContext(store, item, item))
    golden = choice.manifest.sources["golden"]
    with pytest.raises(IntegrityError) if isinstance(error, IntegrityError) else nullcontext():
        assert time_engine(engine_of(choice.entry), Latency(), golden, work, afresh=True) is None
