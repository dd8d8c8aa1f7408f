import pytest

from enginesmith.registry.rollouts.reports import Heard, NodeReport
from enginesmith.registry.rollouts.rollout_state import count_time, format_time
from pipeline.rollout import advance
from pipeline.rollout.advance import GateResult
from tests.pipeline.rollout.fleet import NODES, at, begin, plan, registry


def judge(failing: int, count: int, health_ppm: int, second: float = 31, **options: int) -> GateResult:
    store, _, second_manifest = registry()
    rollout = count_time(begin(store, second_manifest, plan("50%", "100%", health_ppm=health_ppm, **options)), at(0))
    reports = tuple(report(node.name, second - 1, index < failing) for index, node in enumerate(NODES[:count]))
    (result,) = advance.judge_gates(rollout, Heard(count, reports), (), at(second))
    return result


def report(node: str, second: float, fails: bool):
    time = format_time(at(second))
    return NodeReport(node, "eu", "2", time, time, "unhealthy" if fails else "", "told" if fails else "")


@pytest.mark.parametrize("health_ppm", [950_000, 900_000, 800_000, 500_000])
def test_if_all_reporting_nodes_fail_it_fails_at_once(health_ppm):
    verdicts = judge(8, 8, health_ppm)
    assert verdicts.verdict == "fail" and "8 of 8 reporting nodes failed" in verdicts.why
    assert judge(8, 8, health_ppm, least_reports=100).verdict == "fail"


@pytest.mark.parametrize(("failing", "count"), [(1, 1), (2, 2), (2, 8), (1, 4)])
def test_a_share_over_the_limit_never_passes(failing, count):
    assert judge(failing, count, 900_000).verdict == "wait"
    assert judge(failing, count, 900_000, second=700).verdict == "fail" and judge(0, count, 900_000).verdict == "pass"
