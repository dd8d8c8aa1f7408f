"""What IREE compiles into something else: refused with the node's name, or written so that it is right."""

import onnx
import pytest

from builders.errors import ModelError
from builders.iree import compile as iree
from builders.iree.control import wrong_loops, wrong_scans
from tests.conformance.items import torture_item
from tests.conformance.torture import GRAPHS
from tests.conformance.torture.graph import model
from tests.conformance.trial import attempt, backend_of, target_for


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("iree.compiler")
    pytest.importorskip("iree.runtime")
    return backend_of("iree")


def loop(begins: str, again: str) -> onnx.ModelProto:
    """A Loop of three turns that begins if `begins` says so, and goes on if `again` does."""
    return model(
        f"""g (bool c, float[2] x) => (float[2] y) {{
            times = Constant <value = int64 {{3}}> ()
            yes = Constant <value = bool {{1}}> () no = Constant <value = bool {{0}}> ()
            y = Loop (times, {begins}, x) <body = body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {{
                one = Constant <value = int64 {{1}}> () again = {again} t = Add(s, s) }}>
        }}"""
    )


@pytest.mark.parametrize("begins", ["yes", '""'])
@pytest.mark.parametrize("again", ["Identity(go)", "Identity(yes)", "And(go, yes)", "Or(c, go)", "Cast <to = 9> (one)"])
def test_a_loop_that_runs_every_turn_is_taken(begins, again):
    assert list(wrong_loops(loop(begins, again).graph)) == []


@pytest.mark.parametrize(
    ("begins", "again"),
    [
        *(("yes", again) for again in ("Identity(c)", "Identity(no)", "Not(go)", "Less(i, one)", "And(go, c)")),
        *((begins, again) for begins in ("c", "no") for again in ("Identity(go)", "Identity(yes)")),
    ],
)
def test_a_loop_that_may_stop_is_not(begins, again):
    assert [
        reason for reason in wrong_loops(loop(begins, again).graph) if "also when its condition says stop" in reason
    ]


@pytest.mark.parametrize(
    "text",
    [
        "last, y = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = b (float[3] s, float[3] e) => "
        "(float[3] t, float[3] o) { t = Add(s, e) o = Neg(s) }> (start, x)",
        "last, y = Scan <num_scan_inputs = 1, scan_output_axes = [1], body = b (float[3] s, float[3] e) => "
        "(float[3] t, float[3] o) { t = Add(s, e) o = Neg(s) }> (start, x)",
    ],
)
def test_a_scan_that_goes_another_way_is_not_taken(text):
    scan = model(f"g (float[3] start, float[3, 3] x) => (float[3] last, float[3, 3] y) {{ {text} }}")
    assert [reason for reason in wrong_scans(scan.graph) if "whatever scan_" in reason]


def test_a_scan_of_fixed_sizes_is_taken_and_one_that_collects_dynamic_ones_is_not():
    text = """g (float[3] start, float[{n}, 3] x) => (float[3] last, float[{n}, 3] y) {{
        last, y = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] e) => (float[3] t, float[3] o) {{
            t = Add(s, e) o = Neg(s) }}> (start, x) }}"""
    assert list(wrong_scans(model(text.format(n=4)).graph)) == []
    assert [reason for reason in wrong_scans(model(text.format(n="n")).graph) if "of a dynamic size" in reason]


def test_the_error_names_the_node_and_comes_before_the_compiler(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(iree, "_compiler", lambda: pytest.fail("it was compiled"))
    made = loop("c", "Identity(go)")
    made.graph.node[-1].name = "decoder/steps"
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(
        ModelError, match=r"node 'decoder/steps' \(Loop\) runs .* says stop; give it .* or use onnxruntim"
    ):
        iree.compile_model(tmp_path / "m.onnx", tmp_path, [])


def test_what_runs_on_is_refused_and_what_need_not_stop_is_right(backend, tmp_path):
    refused = [name for name in GRAPHS if name.startswith("loop_that") or name == "loop_until_the_data_says_stop"]
    right = ["loop_as_often_as_an_input_says", "loop_within_a_loop"]
    found = {name: attempt(backend, target_for(backend), torture_item(name), tmp_path) for name in (*refused, *right)}
    assert {found[name].kind for name in refused} == {"refused"} and len(refused) == 5, found
    assert found["loop_within_a_loop"].kind == "passed", found


@pytest.mark.parametrize("name", [name for name in GRAPHS if name.startswith("slice_backwards")])
def test_a_slice_backwards_begins_at_the_last_entry(backend, tmp_path, name):
    """It read what lies in front of the tensor."""
    found = attempt(backend, target_for(backend), torture_item(name), tmp_path)
    assert found.kind == "passed", found
