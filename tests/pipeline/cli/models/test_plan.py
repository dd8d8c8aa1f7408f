"""`enginesmith plan`: mistakes of a spec as lines, and nothing built."""

import pytest

from pipeline.cli.models.build import is_stuck
from tests.pipeline.projects import Project


@pytest.mark.parametrize(
    ("counts", "units", "stuck"),
    [
        ({"refused": 2}, 2, True),
        ({"refused": 2}, 3, False),
        ({"failed": 1, "refused": 0}, 5, True),
        ({"build": 1, "unknown": 2}, 3, False),
        ({}, 0, False),
    ],
)
def test_what_makes_a_plan_end_with_1(counts: dict[str, int], units: int, stuck: bool) -> None:
    assert is_stuck(counts, units) is stuck


def test_a_plan_of_refusals_alone_ends_with_1(project: Project) -> None:
    project.change_spec(targets=["sm_75"], precisions=["fp32"], calibration=None)
    done = project.run("plan", project.spec)
    assert done.code == 1 and "0 build, 0 cached, 1 refused" in done.out
    assert project.run("plan", "--all", project.spec.parent).code == 1


def test_each_mistake_of_several_starts_with_error(project: Project) -> None:
    project.change_spec(modle="x", precisions=["fp31"])
    lines = project.run("plan", project.spec).err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"error: {project.spec}:") for line in lines)


def test_a_plan_builds_nothing(project: Project) -> None:
    units = project.run("plan", project.spec, "--json").json["units"]
    assert {unit["action"] for unit in units} == {"build", "refused"}
    assert not (project.registry / "models").exists() and not (project.registry / "records" / "build").exists()
