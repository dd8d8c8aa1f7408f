"""A model that came quantized without Q/DQ nodes is not shown as fp32 in silence; int8-dynamic takes it as it is."""

import onnx

from pipeline.quantization.insertion_points import count_integer_nodes
from pipeline.quantization.schemes.write import quantize_dynamic
from tests.pipeline.projects import Project


def quantize_source(project: Project) -> onnx.ModelProto:
    """The project's own model, with its MatMuls in integers that are scaled at run time."""
    (path,) = project.folder.glob("*.onnx")
    onnx.save(quantize_dynamic(onnx.load(path))[0], path)
    return onnx.load(path)


def test_what_computes_in_int8_itself_says_so_everywhere(project: Project) -> None:
    model = quantize_source(project)
    assert count_integer_nodes(model) and {name for name, _ in count_integer_nodes(model)} == {"MatMulInteger"}
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8-dynamic"], backends={"onnxruntime": {}})
    planned = project.run("plan", project.spec)
    built = project.run("build", project.spec, "--json")
    assert built.code == 0, built.err
    rows = {row["precision"]: row for row in built.json["engines"]}
    assert rows["fp32"]["status"] == rows["int8-dynamic"]["status"] == "proven"
    assert "in int8, as the model came (" in rows["fp32"]["reason"] and "MatMulInteger" in rows["fp32"]["reason"]
    assert "as the model came" not in rows["int8-dynamic"]["reason"]
    again = project.run("plan", project.spec)
    assert planned.code == 0 and "as the model came" in again.out
    page = next((project.registry / "models").glob("*/versions/1/report.html"))
    assert "as the model came" in page.read_text()
