"""`enginery rebuild` on the CPU: ONNX Runtime writes the same bytes again, and nothing is published."""

from tests.pipeline.projects import Project


def test_a_cpu_engine_is_rebuilt_and_nothing_is_left_behind(built: Project) -> None:
    before = sorted(path for path in built.registry.rglob("*") if path.is_file())
    done = built.run("rebuild", "tiny", "--target", "cpu", "--precision", "fp32", "--times", 2, "--json")
    assert done.code == 0, done.err
    report = done.json
    assert (report["times"], report["passed"], report["byte_equal"]) == (2, True, True)
    assert report["published"]["rebuilt"] is True
    assert report["outputs"]["logits"]["bit_equal"] is True
    assert sorted(path for path in built.registry.rglob("*") if path.is_file()) == before
