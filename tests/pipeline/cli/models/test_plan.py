"""`enginery plan`: mistakes of a spec as lines, and nothing built."""

from tests.pipeline.projects import Project


def test_each_mistake_of_several_starts_with_error(project: Project) -> None:
    project.change_spec(modle="x", precisions=["fp31"])
    lines = project.run("plan", project.spec).err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"error: {project.spec}:") for line in lines)


def test_a_plan_builds_nothing(project: Project) -> None:
    units = project.run("plan", project.spec, "--json").json["units"]
    assert {unit["action"] for unit in units} == {"build", "refused"}
    assert not (project.registry / "models").exists()
    assert not (project.registry / "records" / "build").exists()
