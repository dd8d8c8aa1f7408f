import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from pipeline.orchestration.run import RunOptions
from pipeline.outcome import Outcome
from pipeline.spec.ensembles.model import load_ensemble
from pipeline.spec.model import load_spec
from tests.ensembles import write_ensemble
from tests.pipeline.drafts.graphs import halving, save, value, write
from tests.pipeline.projects import exit_code, raising
from tests.pipeline.quantization.small_nets import build
from tests.stateful_ensembles import write_stateful_ensemble


def init(*words: object) -> int:
    return exit_code("init", *words)


def test_the_spec_is_written_beside_the_model_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = halving(tmp_path / "net.onnx").rename(tmp_path / "net.ONNX")
    assert init(model) == 0
    spec = load_spec(tmp_path / "net.yaml")
    assert (spec.model, spec.source.onnx) == ("net", "net.ONNX")
    assert "enginesmith plan" in capsys.readouterr().err
    assert init(model) == 2 and "exists" in capsys.readouterr().err and init(model, "--force") == 0


def test_the_first_look_lists_int8_compilers_and_missing_data(tmp_path, capsys):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Det", ["h"], ["y"], "det")]
    model = write(tmp_path / "net.onnx", nodes, [value("x", ["n", 2, 2])], w=[[1, 2], [3, 4]])
    assert init(model) == 0
    output = capsys.readouterr().err
    assert output.startswith("net.onnx: x [n, 2, 2] -> y; running it"), "before the seconds that its sizes take"
    assert "int8 can take 100 % of the multiplications with weights" in output
    assert "no data: engines are proven on random inputs, and int8 is left out" in output
    assert "tensorrt-rtx may refuse node 'det': Det is not read by its parser" in output
    assert "x: float32 [batch, 2, 2]" in output
    np.savez(tmp_path / "requests.npz", x=np.random.default_rng(0).standard_normal((30, 2, 2)).astype("f4"))
    assert init(model, "--force", "--from-requests", tmp_path / "requests.npz") == 0
    assert "no data" not in capsys.readouterr().err
    spec = load_spec(tmp_path / "net.yaml")
    assert spec.precisions == ("fp32", "fp16", "int8") and spec.calibration and spec.golden
    assert [len(np.load(tmp_path / f"{name}.npz")["x"]) for name in ("golden", "calibration")] == [6, 24]


@pytest.mark.parametrize(
    ("usual", "other", "dims"), [(64, 64, (32, 64, 128)), (64, 20, (10, 64, 128)), (3, 300, (1, 3, 300))]
)
def test_dims_range_from_half_the_smallest_request_to_the_largest_run(tmp_path, usual, other, dims):
    model = write(tmp_path / "net.onnx", [helper.make_node("Exp", ["x"], ["y"])], [value("x", ["batch", "height", 2])])
    lines = [json.dumps({"x": [[[index, 1]] * (other if index == 5 else usual)]}) for index in range(9)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    assert init(model, "--from-requests", tmp_path / "requests.jsonl") == 0
    height = load_spec(tmp_path / "net.yaml").dims["height"]
    assert (height.min, height.opt, height.max) == dims
    assert f"{dims[0]} is half of the least" in (tmp_path / "net.yaml").read_text() or dims[0] == 1


def test_a_dim_indexed_by_requests_is_not_cut_below_them(tmp_path: Path) -> None:
    inputs = [value("x", ["nodes", 2]), value("edges", ["edges"], onnx.TensorProto.INT64)]
    model = write(tmp_path / "net.onnx", [helper.make_node("Gather", ["x", "edges"], ["y"])], inputs)
    x, edges = np.random.default_rng(0).standard_normal((30, 40, 2)).astype("f4"), np.tile(np.arange(40), (30, 2))
    np.savez(tmp_path / "requests.npz", x=x, edges=edges)
    assert init(model, "--from-requests", tmp_path / "requests.npz") == 0
    dims = load_spec(tmp_path / "net.yaml").dims
    assert (dims["nodes"].min, dims["edges"].min) == (40, 40) and dims["nodes"].max > 40


def test_guessed_dims_allow_only_the_sizes_in_requests(tmp_path: Path) -> None:
    rows = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = helper.make_node("Constant", [], ["shape"], value_ints=[0, 91, 11])
    model = write(tmp_path / "net.onnx", [shape, rows], [value("x", ["batch", "k"])])
    np.savez(tmp_path / "requests.npz", x=np.random.default_rng(0).standard_normal((30, 1001)).astype("f4"))
    assert init(model, "--from-requests", tmp_path / "requests.npz") == 0
    dims = load_spec(tmp_path / "net.yaml").dims
    assert (dims["batch"].min, dims["batch"].max) == (1, 1) and (dims["k"].min, dims["k"].max) == (1001, 1001)


@pytest.mark.parametrize(
    ("dtype", "values", "read", "is_constant"),
    [("int64", [1], "row", 1), ("int64", [1, 0], "row", 0), ("int64", [1], "n", 0), ("double", [1.0], "row", 0)],
)
def test_a_branch_input_becomes_a_constant_if_all_requests_agree(dtype, values, read, is_constant, tmp_path):
    keys = ("then_branch", "else_branch")
    bodies = (f"{key} = {key} () => (float[b,4] {key}_y) {{{key}_y = MatMul(x, w)}}" for key in keys)
    text = f"""c = Cast<to=9>(n)
        b = If<{", ".join(bodies)}>(c)
        f = Cast<to=1>({read})
        m = ReduceMean(z, row)
        p = Mul(m, f)
        y = Add(b, p)"""
    inputs = f"float[batch,?] x, float[batch,?] z, {dtype} n"
    x, z = (np.random.default_rng(0).standard_normal((30, 1, size)).astype("f4") for size in (3, 7))
    np.savez(tmp_path / "requests.npz", x=x, z=z, n=np.resize(values, 30))
    spec_path, output = tmp_path / "net.yaml", "is 1 in all requests" if is_constant else "decides which branch"
    for model in (tmp_path / "net.onnx", tmp_path / f"models--org--net/snapshots/{'0' * 40}/net.onnx"):  # of the Hub
        model.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(build(inputs, "float[batch,4] y", text, {"w": np.ones((3, 4)), "row": [1]}), model)
        assert init(model, "--from-requests", tmp_path / "requests.npz", "--out", spec_path, "--force") == 0
        spec = load_spec(spec_path)
        assert [*spec.inputs] == [*np.load(tmp_path / "golden.npz")] == ["x", "z", "n"][: 3 - is_constant]
        assert spec.source.arguments == ({"n": 1} if is_constant else {})
        assert spec.dims[spec.inputs["z"].shape[1]].opt == 7, "of one branch, z's axis has the name that x's had"
        assert f"# 'n' {output}" in spec_path.read_text()


def test_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halving(tmp_path / "net.onnx")
    np.savez(tmp_path / "requests.npz", x=np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype("f4"))
    paths_before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(np, "savez_compressed", raising(KeyboardInterrupt()))
    assert init(tmp_path / "net.onnx", "--from-requests", tmp_path / "requests.npz") == 130
    assert sorted(tmp_path.iterdir()) == paths_before


def test_a_colon_in_a_file_name_is_no_entry_point(tmp_path: Path) -> None:
    assert init(halving(tmp_path / "net:2.onnx"), "--out", tmp_path / "net.yaml") == 0
    assert load_spec(tmp_path / "net.yaml").source.onnx == "net:2.onnx"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.onnx"], "does not exist"),
        (["saved"], "is a folder; name an ONNX file"),
        (["model.bin"], "holds weights or a pickled module, without the model's code; give the function"),
        (["model.xyz"], "has the ending .xyz, which is unknown"),
        (["model.tflite"], "convert it to ONNX with tf2onnx"),
        (["pointer.onnx"], "is a Git LFS pointer in the place of the file; run `git lfs pull`"),
        (["--from-requests", "model.bin"], "needs a MODEL"),
        (["net.onnx", "--out", "other/spec.yaml"], "is outside"),
    ],
)
def test_mistakes_are_reported(tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    for name in ("model.bin", "model.xyz", "model.tflite"):
        (tmp_path / name).touch()
    (tmp_path / "pointer.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    halving(tmp_path / "net.onnx")
    assert init(*words) == 2
    assert message in capsys.readouterr().err


def test_several_graphs_are_connected_by_names_and_shapes(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path / "pair").parent
    for spec in folder.glob("*.yaml"):
        spec.unlink()
    assert init(folder / "encoder.onnx", f"head={folder / 'decoder.onnx'}", "--out", folder / "whole.yaml") == 0
    ensemble = load_ensemble(folder / "whole.yaml")
    expected = {"encoder": "whole-encoder", "head": "whole-head"}
    assert {name: graph.model for name, graph in ensemble.graphs.items()} == expected
    assert ensemble.spec.connections == {"head.memory": "encoder.hidden"}
    assert ensemble.graphs["head"].source.onnx == "decoder.onnx"
    assert init(folder / "encoder.onnx", folder / "decoder.onnx", "--out", folder / "whole.yaml") == 2


def test_states_of_several_graphs_stay_states_and_data_has_sequences(tmp_path: Path) -> None:
    folder = write_stateful_ensemble(tmp_path / "told").parent
    for spec in folder.glob("*.yaml"):
        spec.unlink()
    assert init(folder / "encoder.onnx", folder / "decoder.onnx", "--out", folder / "whole.yaml") == 0
    ensemble = load_ensemble(folder / "whole.yaml")
    assert [(state.input, state.output) for state in ensemble.graphs["decoder"].states()] == [("past", "present")]
    assert (
        ensemble.spec.connections["decoder.memory"] == "encoder.hidden" and ensemble.spec.golden.sequence == "sequence"
    )
    text = (folder / "whole.yaml").read_text()
    assert "#   encoder.source: float32" in text and "decoder.past" not in text


def test_unconnected_graphs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_ensemble(tmp_path / "pair").parent
    for spec in folder.glob("*.yaml"):
        spec.unlink()
    assert init(folder / "encoder.onnx", f"other={folder / 'encoder.onnx'}", "--out", folder / "encoder.yaml") == 0
    output = capsys.readouterr().err
    assert "encoder.yaml, and encoder-encoder.yaml, other.yaml" in output, "the whole has the name of one of its graphs"
    assert all(f"{name}: side by side: no output fits an input" in output for name in ("encoder", "other"))
    shapes = {
        f"{name}.{key}": (4, 6, 8)[:rank] for name in ("encoder", "other") for key, rank in (("x", 3), ("attention", 2))
    }
    np.savez(folder / "golden.npz", **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    loaded_spec = load_ensemble(folder / "encoder.yaml").spec
    assert (loaded_spec.connections, loaded_spec.outputs) == ({}, ("encoder.hidden", "other.hidden"))
    onnx.save(build("float[b] t", "float[b] r", "r = Abs(t)", {}), folder / "n.onnx")
    assert init(*(f"{name}={folder / 'n.onnx'}" for name in ("c", "d")), "--out", folder / "unclear.yaml") == 0
    assert "  # FILL_IN: nothing shows what connects d; it takes t float32" in (folder / "unclear.yaml").read_text()
    assert "c: FILL_IN: nothing shows what connects it" in capsys.readouterr().err
    graphs = (f"{name}={folder / 'encoder.onnx'}" for name in ("a", "a-a"))
    assert init(*graphs, "--out", folder / "a.yaml") == 2, "the first graph's file has the name of the second's"


def test_outputs_that_look_like_states_propose_no_metric(tmp_path: Path) -> None:
    inputs, outputs = (
        f"float[b,128] {first}, float[b,2,2,9] {cache}" for first, cache in (("hop", "cache"), ("clean", "cache_out"))
    )
    onnx.save(build(inputs, outputs, "clean = Abs(hop) cache_out = Abs(cache)", {}), tmp_path / "enhancer.onnx")
    assert init(tmp_path / "enhancer.onnx") == 0
    assert "metric" not in (tmp_path / "enhancer.yaml").read_text()


def test_a_metric_of_the_ensemble_follows_its_last_graph(tmp_path: Path) -> None:
    end_text, hidden_text = "int64[batch,places] ids, float[batch,places,16] hidden", "float[batch,places,16] hidden"
    weights = {"w": np.zeros((16, 2000), np.float32)}
    decoder = build(end_text, "float[batch,places,2000] logits", "logits = MatMul(hidden, w)", weights)
    onnx.save(decoder, tmp_path / "decoder.onnx")
    onnx.save(build("float[batch,places,16] x", hidden_text, "hidden = Relu(x)", {}), tmp_path / "encoder.onnx")
    files = [tmp_path / f"{name}.onnx" for name in ("encoder", "decoder")]
    assert init(*files, "--out", tmp_path / "whole.yaml") == 0
    metric = "labels: ARRAY, metric: {name: tokens, output: decoder.logits, floor: 0.99}"
    assert metric in (tmp_path / "whole.yaml").read_text()


def test_masks_are_shared_and_ambiguous_outputs_are_asked(tmp_path: Path) -> None:
    def sums(name: str, inputs: list[str], outputs: list[str], mask: str) -> Path:
        nodes = [helper.make_node("Sum", [*inputs, mask], [output]) for output in outputs]
        return save(
            tmp_path / name, nodes, *([value(key, ["n", 4]) for key in keys] for keys in ((*inputs, mask), outputs))
        )

    first_sums = sums("first.onnx", ["x"], ["a", "b"], "mask")
    assert init(first_sums, sums("second.onnx", ["y"], ["z"], "input_mask"), "--out", tmp_path / "both.yaml") == 0
    text = (tmp_path / "both.yaml").read_text()
    assert "# FILL_IN? second.y: one of first.a, first.b, or an input of the ensemble" in text
    assert "  second.input_mask: mask " in text and "  first.mask: mask " in text
    assert "#   first.x: float32 [batch, 4]" in text


def test_requests_without_a_models_states_name_two_remedies(tmp_path, capsys):
    inputs, outputs = "float[batch,4] x, float[batch,4] state", "float[batch,4] y, float[batch,4] stateN"
    onnx.save(build(inputs, outputs, "stateN = Add(x, state) y = Relu(stateN)", {}), tmp_path / "net.onnx")
    steps = np.random.default_rng(0).standard_normal((30, 4)).astype("f4")
    np.savez(tmp_path / "requests.npz", x=steps)
    assert init(tmp_path / "net.onnx", "--from-requests", tmp_path / "requests.npz") == 2
    err = capsys.readouterr().err
    assert "'state' is a state: write the spec without --from-requests" in err and "streams.complete(inputs)" in err
    np.savez(tmp_path / "requests.npz", x=steps, state=steps[::-1])
    assert init(tmp_path / "net.onnx", "--from-requests", tmp_path / "requests.npz") == 0
    assert "state: ordinary inputs, as in the requests" in capsys.readouterr().err
    assert not load_spec(tmp_path / "net.yaml").state


def test_build_of_a_model_file_drafts_its_spec_once_for_the_requested_targets(tmp_path, monkeypatch, capsys):
    requests: list[tuple[str, str | None]] = []

    def compile_spec(spec: str, options: RunOptions, *_: object) -> Outcome:
        requests.append((Path(spec).name, options.targets))
        return Outcome("net", "1", False, (), {})

    monkeypatch.setattr("pipeline.cli.models.build._compile", compile_spec)
    model = halving(tmp_path / "net.onnx")
    for _ in range(2):
        assert exit_code("build", model, "--target", "l4,h100", "--registry", tmp_path / "registry") == 0
    assert load_spec(tmp_path / "net.yaml").targets == ("l4", "h100")
    # A spec that was there is built as it is, or the part of it that is asked for.
    assert requests == [("net.yaml", None), ("net.yaml", "l4,h100")]
    halving(tmp_path / "other.onnx").rename(tmp_path / "Net.onnx")
    assert exit_code("build", tmp_path / "Net.onnx") == 2
    assert "net.yaml is the spec of another model" in capsys.readouterr().err
