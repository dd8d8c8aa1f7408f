import re
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from enginesmith.core.codec import decode
from enginesmith.core.reports.breakdown import QuantizationRecord, QuantizedTensor, RecordedSearch
from tests.validation.page_data import record, version_report
from tests.validation.reporting import test_html
from tests.validation.reporting.test_html import HOSTILE, Page, hostile, overview, render
from validation.reporting.quantization import MOST, SHOWN, facts, frontier_svg, histogram_svg, quantizations, sqnr_text


def without_spreads() -> dict:
    """A report without pictures of quantization, latency and errors."""
    result = test_html.bare()
    return {**result, "reports": [{**report, "spreads": []} for report in result["reports"]]}


def area(picture: str, kind: str) -> float:
    """What the bars of a kind cover, in square pixels to the nearest ten."""
    numbers = re.search(f'class="{kind}"><path[^>]* d="([^"]*)"', picture).group(1)
    points = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", numbers)]
    doubled = sum(x * below - left * y for (x, y), (left, below) in zip(points, points[1:] + points[:1], strict=True))
    return round(abs(doubled) / 2, -1)


@cache
def usual_section() -> str:
    return section({**without_spreads(), "quantization": version_report()["quantization"]})


def section(document: dict) -> str:
    page = render(document)
    return page[page.index("<h2>Quantization</h2>") : page.index('id="failures-title"')]


def report(**changes: object) -> dict:
    return {**without_spreads(), "quantization": {"int8": {**record(), **changes}}}


def drawn(tensor: dict) -> str:
    result = decode(tensor, QuantizedTensor)
    return histogram_svg(result, result.histogram)


def search(**changes: object) -> RecordedSearch:
    return replace(decode(record()["choice"], RecordedSearch), **changes)


def test_the_section_has_figures_table_pictures_frontier_and_reasons():
    result = usual_section()
    text = " ".join(Page(result).text.split())
    assert "94.4 % of the multiplications with weights in int8" in text
    assert "36 nodes compute in int8, 13 left in float" in text
    assert "21.5 dB lowest SQNR of 27 tensors" in text
    assert result.count('<svg class="picture histogram"') == 6
    assert result.count('<svg class="picture frontier"') == 1
    assert "Chosen (ring): 75.0 % at 26.6 dB, where at least 26 dB were asked for." in text
    assert "it multiplies two activations" in text and "reaches 1e+09, as a mask does" in text
    for tensor in record()["tensors"]:
        assert tensor["name"] in text


def test_the_worst_tensors_are_open_and_the_others_folded():
    result = usual_section()
    open_part, folded_part = result.split("7 more, which lose less")
    assert open_part.count('<td class="name">') == SHOWN
    assert folded_part.count('<td class="name">') == 7
    assert "layers.0/attention" in open_part and "layers.12/attention/output" in folded_part


def test_a_row_has_range_extremes_clipping_scale_and_sqnr():
    text = " ".join(Page(usual_section().replace("<td", " <td")).text.split())
    row = "read by /encoder/layers.0/attention/query/MatMul, /encoder/layers.0/attention/key/MatMul and 1 more"
    assert f"activation, uint8, {row} 21.5 dB 0.012 % −3.5 to 2.5 −2 to 2 0.0157" in text  # noqa: RUF001
    assert "≈ 22.5 dB" in text and "no loss" in text


def test_a_thousand_tensors_give_a_bounded_page():
    many_fields = [{**record()["tensors"][-1], "name": f"t{index}"} for index in range(1000)]
    page = render(report(tensors=many_fields))
    assert page[page.index("<h2>Quantization</h2>") :].count('<td class="name">') == MOST
    assert "600 more are in the record" in page
    assert len(page) < 500_000


def test_a_version_without_records_has_no_section():
    assert "<h2>Quantization</h2>" not in render(without_spreads())
    assert quantizations({}) == []


def test_a_quantized_model_is_reported_as_unchanged():
    result = without_spreads()
    for entry in result["engines"]:
        entry["graph"] = result["sources"]["onnx"] if entry["precision"] != "fp16" else "0" * 64
    text = " ".join(Page(section(result)).text.split())
    assert text.count("passed through untouched") == 1
    assert [item["name"] for item in overview(result, pictures=True).quantizations] == ["int8"]


def test_a_graph_without_quantized_nodes_gives_the_reason():
    result = report(tensors=[], quantized=0, macs_share=0.0, choice=None)
    shown_text = section(result)
    text = " ".join(Page(shown_text).text.split())
    assert "0 nodes compute in int8, 13 left in float" in text and "it multiplies two activations" in text
    assert "<svg" not in shown_text


def test_hostile_names_stay_text():
    page = Page(section(hostile({**without_spreads(), "quantization": version_report()["quantization"]})))
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) > 40
    assert not any(name.startswith("on") for name, _ in page.attributes)
    name = "</title><script>alert(1)</script><svg onload='x'>"
    assert Page(section(report(tensors=[{**record()["tensors"][0], "name": name}]))).tags.count("script") == 0


def test_pictures_are_well_formed_with_a_description():
    picture = ElementTree.fromstring(drawn({**record()["tensors"][0], "name": "a <b> & 'c'"}))
    title = picture.find("title").text
    assert title.startswith("Histogram of a <b> & 'c': values from −3.5 to 2.5;")  # noqa: RUF001
    assert "0.012 % are clipped" in title
    assert ElementTree.fromstring(frontier_svg(search(floor_db=None), "int8")) is not None


def test_values_outside_the_range_are_drawn_separately():
    item = record()["tensors"][0] | {"range": [-1.0, 1.0], "seen": [-2.0, 2.0]}
    item["histogram"] = {"span": [-2.0, 2.0], "counts": [1.0] * 60}
    inner_value, outer_value = (area(drawn(item), kind) for kind in ("in", "out"))
    assert inner_value == outer_value > 0
    assert area(drawn({**item, "range": [-2.0, 2.0]}), "out") == 0
    assert drawn(item | {"histogram": {"span": [-2.0, 2.0], "counts": [9.0] * 60}}) == drawn(item)


@pytest.mark.parametrize("span", [[0.0, 0.0], [0.0, 1e-30], [-1e30, 1e30]])
def test_odd_spans_are_drawn(span):
    item = {**record()["tensors"][0], "range": span, "seen": span, "histogram": {"span": span, "counts": [0.0] * 60}}
    assert ElementTree.fromstring(drawn(item)) is not None


def test_the_frontier_marks_run_chosen_and_required_points():
    picture = frontier_svg(search(), "nvfp4")
    assert picture.count('class="run"') == 3 and picture.count('class="chosen"') == 1
    assert "floor 26 dB" in picture and picture.count('class="floor"') == 1
    assert "75.0 % in nvfp4: 26.6 dB, 3 groups left in float" in picture
    assert 'class="chosen"' not in frontier_svg(
        search(frontier=(), chosen=replace(search().chosen, sqnr_db=None)), "int8"
    )


def test_unmeasured_values_are_marked_and_one_node_is_singular():
    assert sqnr_text(QuantizedTensor("x", "activation", "int8", (), (0.0, 1.0), 1.0)) == "not measured"
    single_value = decode({**record(), "macs_share": None, "quantized": 1}, QuantizationRecord)
    assert dict(facts(single_value))["1"].startswith("node computes")
