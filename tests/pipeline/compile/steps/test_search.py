from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.execution.jobs import Job
from enginesmith.registry.store.base import open_store
from pipeline.compile.plan import describe_deciding
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import search
from pipeline.compile.steps.search import SearchQuantization, SearchResults, choose
from pipeline.quantization.search.rates import PEAKS
from pipeline.spec.model import load_spec
from pipeline.values import Observed, Searched, SearchResult
from tests.pipeline.compile.test_steps import EXPORTED, Answering
from tests.pipeline.projects import Project

RANGES = Observed("d" * 64, "f" * 64, "e" * 64, 3)
GPU, CPU = Searched("int8"), Searched("uint8")


class Searching(Answering):
    """Notes the kinds that a job searches, and finds the same for each."""

    def __init__(self, blob: str, ended: str = "") -> None:
        self.result = SearchResult(blob, blob, blob, blob, {}, 1.0, "found", ended)
        self.asked: list[tuple[Searched, ...]] = []

    def answer(self, job: Job[Any]) -> SearchResults:
        assert isinstance(job.request, SearchQuantization) and job.request.most_s < job.limits.timeout_s
        self.asked.append(tuple(item.kind for item in job.request.kinds))
        return SearchResults((self.result,) * len(job.request.kinds))


def searching(folder: Path, ended: str = "") -> tuple[Searching, RunContext]:
    store = open_store(folder / "registry", create=True)
    executor = Searching(store.put_bytes(b"blob"), ended)
    return executor, RunContext(store, executor, executor)


def test_kinds_are_searched_in_one_job_and_each_is_recorded(project: Project, tmp_path: Path) -> None:
    executor, context = searching(tmp_path)
    spec = load_spec(project.spec)
    choose([CPU], EXPORTED, RANGES, Work(spec, context))
    assert choose([GPU, CPU], EXPORTED, RANGES, Work(spec, context)) == {GPU: executor.result, CPU: executor.result}
    choose([CPU, GPU], EXPORTED, RANGES, Work(spec, context))
    assert executor.asked == [(CPU,), (GPU,)]


@pytest.mark.parametrize("ended", ["", "ended after its 9 s"])
def test_a_search_is_repeated_only_with_more_time(project: Project, tmp_path: Path, ended: str) -> None:
    executor, context = searching(tmp_path, ended)
    for limit in (10, 10, 20, 10):
        project.change_spec(timeouts={"quantization_s": limit})
        assert choose([CPU], EXPORTED, RANGES, Work(load_spec(project.spec), context))[CPU] == executor.result
    assert len(executor.asked) == (2 if ended else 1)
    executor.result = replace(executor.result, ended="")
    project.change_spec(timeouts={"quantization_s": 30})
    choose([CPU], EXPORTED, RANGES, Work(load_spec(project.spec), context))
    project.change_spec(timeouts={"quantization_s": 10})
    assert choose([CPU], EXPORTED, RANGES, Work(load_spec(project.spec), context))[CPU].ended == ""


def test_trials_judged_by_decibels_despite_a_metric_are_reported(project: Project) -> None:
    assert describe_deciding(load_spec(project.spec)) == ""
    metric = {"name": "embeddings", "output": "logits", "decides": ["int8"], "floor": 0.9}
    project.change_spec(golden={"data": "golden.npz", "metric": metric})
    assert "SQNR judged its trials, but embeddings will" in describe_deciding(load_spec(project.spec))


def test_the_first_target_with_known_rates_models_costs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "peaks_of", lambda target, _: PEAKS["sm_89"] if target.name == "arm64" else None)
    project.change_spec(targets=["cpu", "arm64"])
    assert search._find_kind(CPU, load_spec(project.spec), EXPORTED).peaks == PEAKS["sm_89"]
