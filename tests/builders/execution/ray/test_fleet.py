"""Placement, losses and numbers on a simulated fleet: see conftest."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from builders.execution.jobs import Job, JobEvent, Needs, ProcessLimits, ReducedRequest, Retrying, Started, Waiting
from builders.execution.ray import RayExecutor
from enginesmith.core.errors import StepError
from tests.builders.execution.ray.conftest import GENERATIONS
from tests.calls import Call, call_job
from tests.waiting import PATIENCE_S, text_of, until

pytest.importorskip("ray")
JOBS = "tests.builders.jobs"
pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.usefixtures("generations")]


def job(function: str, needs: Needs | None = None, leaner: dict | None = None, **arguments: object) -> Job:
    request = ReducedRequest(Call(f"{JOBS}:{function}", {**arguments, **leaner}), f"with {leaner}") if leaner else None
    entries = {"limits": ProcessLimits(120), "needs": needs or Needs(), "reduced": request}
    return call_job("unit", f"{JOBS}:{function}", arguments, **entries)


def only(generation: str, **more: object) -> Needs:
    return Needs({"enginesmith/sm": generation}, required=True, **more)


def raylets(fleet) -> dict[str, int]:
    """The pid of each node's raylet, by the node's name."""
    return {node._ray_params.node_name: node.all_processes["raylet"][0].process.pid for node in fleet.list_all_nodes()}


class Told(list[JobEvent]):
    @property
    def waits(self) -> list[str]:
        return [event.why for event in self if isinstance(event, Waiting)]

    @property
    def retries(self) -> list[str]:
        return [event.why for event in self if isinstance(event, Retrying)]

    @property
    def places(self) -> list[str]:
        return [event.where for event in self if isinstance(event, Started)]


def test_each_unit_is_built_on_its_generation_with_a_gpu(fleet, executor):
    nodes_before = raylets(fleet)
    with ThreadPoolExecutor(5) as pool:
        seen_values = list(pool.map(lambda g: executor.run(job("raylet", only(g, gpus=1))), GENERATIONS))
    assert seen_values == [nodes_before[generation] for generation in GENERATIONS]


def test_a_product_is_a_label_too(fleet, executor):
    needs = Needs({"enginesmith/sm": "sm_89", "enginesmith/product": "l4"}, required=True)
    assert executor.run(job("raylet", needs)) == raylets(fleet)["sm_89"]
    with pytest.raises(StepError, match="enginesmith/product=l40s"):
        executor.run(job("raylet", Needs({"enginesmith/sm": "sm_89", "enginesmith/product": "l40s"}, required=True)))


@pytest.mark.parametrize(("generation", "needs"), [("sm_90", {"gpus": 1}), ("sm_80", {"memory_mib": 1200})])
def test_gpus_and_memory_are_held_exclusively(executor, tmp_path, generation, needs):
    go, begun_paths = tmp_path / "go", [tmp_path / "0", tmp_path / "1"]
    with ThreadPoolExecutor(2) as pool:
        kept_jobs = [job("stay", only(generation, **needs), path=str(path), go=str(go)) for path in begun_paths]
        runs = [pool.submit(executor.run, item) for item in kept_jobs]
        until(lambda: executor._listener and len(executor._listener._tasks) == 2)
        until(lambda: any(path.exists() for path in begun_paths))
        assert executor.run(job("add", only(generation), a=1, b=2)) == 3  # it was asked for later, and has come
        assert not all(path.exists() for path in begun_paths)
        go.touch()
        assert [run.result(PATIENCE_S) for run in runs] == [None, None]


def test_two_jobs_that_fit_run_at_once(executor, tmp_path):
    jobs = [job("meet", only("sm_80", memory_mib=700), mine=a, other=b, folder=str(tmp_path)) for a, b in ("ab", "ba")]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(executor.run, jobs)) == ["met", "met"]


def test_a_job_larger_than_any_node_takes_the_largest_node(executor):
    assert executor.run(job("add", only("sm_75", memory_mib=1 << 20), a=1, b=2)) == 3


def test_a_missing_preferred_generation_is_ignored(executor):
    assert executor.run(job("add", Needs({"enginesmith/sm": "sm_121"}), a=1, b=1)) == 2


def test_a_generation_may_come_late(fleet, executor):
    seen_items = Told()
    with RayExecutor(fleet.address, wait_s=600) as patient, ThreadPoolExecutor(1) as pool:
        waiting_future = pool.submit(patient.run, job("raylet", only("sm_120", gpus=1)), seen_items.append)
        until(lambda: seen_items.waits)
        late_node = fleet.add_node(num_cpus=1, num_gpus=1, labels={"enginesmith/sm": "sm_120"}, node_name="late")
        assert waiting_future.result(PATIENCE_S) == late_node.all_processes["raylet"][0].process.pid
    assert "a node with enginesmith/sm=sm_120 and 1 GPU: none yet, 10:00 left" in seen_items.waits
    assert seen_items.places == ["late (sm_120)"]


def test_waiting_has_a_limit(fleet):
    with RayExecutor(fleet.address, wait_s=1) as executor, pytest.raises(StepError, match="came in 0:01") as error:
        executor.run(job("add", only("sm_103"), a=1, b=1))
    assert error.value.kind == "no-node"


def test_a_unit_on_a_killed_node_is_rescheduled(fleet, executor, tmp_path):
    doomed = fleet.add_node(num_cpus=2, labels={"enginesmith/sm": "sm_121"}, node_name="doomed")
    seen_items, noted_path = Told(), tmp_path / "times"
    fields = {"enginesmith/sm": "sm_121"}
    # A preference looks at nodes as they were up to two seconds ago; a need that none of those meets looks again.
    assert executor.run(job("add", only("sm_121"), a=1, b=1)) == 2
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(executor.run, job("sleep_once", Needs(fields), path=str(noted_path)), seen_items.append)
        text_of(noted_path)
        until(lambda: seen_items.places, "the driver has heard where it runs")
        os.kill(doomed.all_processes["raylet"][0].process.pid, 9)
        assert future.result(PATIENCE_S) == "elsewhere"
    assert seen_items.places[0] == "doomed (sm_121)" and seen_items.places[1] != seen_items.places[0]
    assert seen_items.retries == ["its node was lost; try 2: on another node"]


def test_sixty_units_each_end_once_despite_crashes(fleet, tmp_path):
    drawn_texts = ["crash once"] * 5 + ["crash"] * 2 + ["error"] * 3 + ["built"] * 50
    random.Random(6).shuffle(drawn_texts)
    fates = dict(enumerate(drawn_texts))

    def one(index: int) -> str:
        needs = Needs({"enginesmith/sm": GENERATIONS[index % 5]}, required=True)
        try:
            unit = job("unit", needs, index=index, fate=fates[index], folder=str(tmp_path))
            return "built" if executor.run(unit) == index else "?"
        except StepError as error:
            return error.kind
        except Exception as error:
            return type(error).__name__

    with RayExecutor(fleet.address, modules=None) as executor, ThreadPoolExecutor(64) as pool:
        outcomes = dict(zip(fates, pool.map(one, fates), strict=True))
    kinds = {"built": "built", "crash once": "built", "crash": "crash", "error": "ModelError"}
    assert outcomes == {index: kinds[fate] for index, fate in fates.items()}
    marks = {int(path.stem): path.read_text() for path in tmp_path.glob("*.built")}
    assert marks == {index: "x" for index, outcome in outcomes.items() if outcome == "built"}
