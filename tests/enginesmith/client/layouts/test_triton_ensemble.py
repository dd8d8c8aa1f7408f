from pathlib import Path

import numpy as np
import pytest

from enginesmith.client.client import Client
from enginesmith.client.layouts.base import Placed
from enginesmith.client.layouts.triton import Triton
from enginesmith.client.layouts.triton_config import DynamicBatching
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions import channels
from pipeline.spec.ensembles.model import load_ensemble
from tests.enginesmith.client.layouts.engines import publish_pair
from tests.enginesmith.client.layouts.model_config import read_config
from tests.enginesmith.registries import names_in
from tests.enginesmith.registry.test_ensembles import publish_graphs, publish_whole
from tests.pipeline.projects import exit_code


def place(store: Store, dest: Path, layout: Triton = Triton(), target: str = "cpu") -> Placed:  # noqa: B008
    return Client(store.uri).place("pair:candidate", dest, layout, target=target)


@pytest.mark.parametrize("least", [1, 2])
def test_an_ensemble_becomes_a_model_for_each_graph_and_one_of_steps(store: Store, dest: Path, least: int) -> None:
    publish_pair(store, 1, 2, least)
    placed_engine = place(store, dest)
    assert names_in(dest)[1:] == ["pair", "pair@decoder", "pair@encoder"]
    assert placed_engine.swapped and placed_engine.pulled[0].path == dest / "pair" / "1" / "model.json"
    batch = "" if least == 1 else "-1,"
    expected = f"""name: "pair" platform: "ensemble" max_batch_size: {16 if least == 1 else 0}
        input {{ name: "image" data_type: TYPE_FP32 dims: [{batch} 1, 8, 8] }}
        output {{ name: "decoder.scores" data_type: TYPE_FP32 dims: [{batch} 10] }}
        version_policy {{ specific {{ versions: 1 }} }}
        parameters {{ key: "enginesmith_version" value {{ string_value: "1" }} }}
        ensemble_scheduling {{
          step {{ model_name: "pair@encoder" model_version: 1 input_map {{ key: "image" value: "image" }}
            output_map {{ key: "logits" value: "encoder.logits" }} }}
          step {{ model_name: "pair@decoder" model_version: 1 input_map {{ key: "logits" value: "encoder.logits" }}
            output_map {{ key: "scores" value: "decoder.scores" }} }} }}"""
    (dest / "expected").write_text(expected)
    assert read_config(dest / "pair" / "config.pbtxt") == read_config(dest / "expected")
    assert not place(store, dest).swapped


def test_options_of_batches_are_those_of_the_graphs(store: Store, dest: Path) -> None:
    publish_pair(store, 1, 2)
    place(store, dest, Triton(DynamicBatching(max_batch_size=4)))
    configs = [read_config(dest / name / "config.pbtxt") for name in ("pair", "pair@encoder", "pair@decoder")]
    assert [config["max_batch_size"] for config in configs] == [4, 4, 4]
    assert ["dynamic_batching" in config for config in configs] == [False, True, True]
    with pytest.raises(InputError, match="max_batch_size 17 is beyond its largest batch, 16"):
        place(store, dest / "other", Triton(DynamicBatching(max_batch_size=17)))
    assert names_in(dest / "other") == [".enginesmith-pair.lock"]


def test_earlier_graphs_stay_served_and_unused_ones_are_deleted(store: Store, dest: Path) -> None:
    """Triton loads models before ensembles: the earlier ensemble still answers, with its graphs."""
    for numbers in ((1, 1), (2, 2), (3, 2)):
        publish_pair(store, *numbers)
        place(store, dest)
    served_names = {name: served_versions(dest / name) for name in ("pair", "pair@encoder", "pair@decoder")}
    assert served_names == {"pair": ["3"], "pair@encoder": ["3", "2"], "pair@decoder": ["2"]}
    assert not place(store, dest).swapped and served_versions(dest / "pair@encoder") == ["3", "2"]
    channels.rollback(store, "pair", "candidate")
    assert place(store, dest).previous == "3" and served_versions(dest / "pair@encoder") == ["2", "3"]
    (dest / "pair@third").mkdir()
    publish_pair(store, 4, 4)
    place(store, dest)
    assert not (dest / "pair@third").exists(), "a graph of an earlier version"


def served_versions(model: Path) -> list[str]:
    return read_config(model / "config.pbtxt")["version_policy"]["specific"]["versions"]


def test_graphs_and_functions_that_triton_cannot_open_are_named(store: Store, dest: Path) -> None:
    publish_whole(store, publish_graphs(store))
    with pytest.raises(UnknownNameError, match="graph 'encoder': Triton does not load tensorrt-rtx engines"):
        place(store, dest, target="sm_89")
    function = {"function": "crop.py:crop", "inputs": {}, "outputs": {}}
    publish_pair(store, 1, 2, functions={"crop": function})
    with pytest.raises(InputError, match="has the function 'crop' between its graphs"):
        place(store, dest)
    assert not dest.exists()


def test_a_state_is_an_input_and_an_output_and_init_reads_it_again(store: Store, dest: Path) -> None:
    publish_pair(store, 1, 2, 2, state=True)
    place(store, dest)
    whole_config = read_config(dest / "pair" / "config.pbtxt")
    assert [tensor["name"] for tensor in whole_config["input"]] == ["image", "decoder.past"]
    assert [tensor["name"] for tensor in whole_config["output"]] == ["decoder.scores", "decoder.present"]
    assert exit_code("init", dest / "pair" / "config.pbtxt") == 0
    np.savez(dest / "golden.npz", image=np.zeros((4, 1, 8, 8), np.float32))
    loaded_ensemble = load_ensemble(dest / "pair.yaml")
    assert loaded_ensemble.spec.connections == {"encoder.image": "image", "decoder.logits": "encoder.logits"}
    decoder = loaded_ensemble.graphs["decoder"]
    assert (decoder.source.onnx, decoder.serve) == ("pair@decoder/1/model.onnx", "triton")
    assert [state.input for state in decoder.states()] == ["past"]
