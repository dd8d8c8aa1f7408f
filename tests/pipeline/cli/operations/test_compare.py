"""`enginesmith backends compare`: exit codes, what is refused before anything is built, and the page."""

from tests.pipeline.projects import Project


def test_where_nothing_runs_it_says_so_and_ends_with_1(project: Project):
    project.change_spec(precisions=["fp32"], calibration=None)
    done = project.run(
        "backends", "compare", project.spec, "--target", "sm_89", "--backend", "tensorrt-rtx,tensorrt", "--json"
    )
    assert done.code == 1
    engines = {engine["backend"]: engine for engine in done.json["engines"]}
    assert engines["tensorrt-rtx"]["status"] == "unproven" and engines["tensorrt-rtx"]["build_s"] > 0
    assert engines["tensorrt"]["status"] == "refused" and "pip install" in engines["tensorrt"]["reason"]
    assert done.json["recommendation"]["unit"] is None and done.json["duels"] == []


def test_a_precision_that_the_spec_does_not_have_is_refused(project: Project):
    done = project.run("backends", "compare", project.spec, "--target", "cpu", "--precision", "fp8")
    assert done.code == 2 and "fp8: not in the spec, which has fp32, int8" in done.err
    done = project.run("backends", "compare", project.spec, "--target", "cpu", "--precision", "fp33")
    assert done.code == 2 and "fp33: there is none; take of the spec's: fp32, int8" in done.err
