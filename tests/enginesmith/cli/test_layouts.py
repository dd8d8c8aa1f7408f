import json
from pathlib import Path

import pytest

from enginesmith.cli import main
from enginesmith.registry.store.base import Store
from tests.enginesmith.client.layouts.engines import cpu_engine, plan
from tests.enginesmith.client.layouts.model_config import read_config
from tests.enginesmith.registries import publish_engines


def run(store: Store, *arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_error:
        main(["pull", "digits", *arguments, "--registry", store.uri])
    return int(exit_error.value.code or 0)


def test_a_repository_is_written_and_printed(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    dest = ("--layout", "triton", "--target", "cpu", "--dest", str(tmp_path / "m"))
    assert run(store, *dest, "--max-batch-size", "4", "--max-queue-delay", "2ms", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["version"], output["swapped"], output["engines"][0]["unit"]) == ("1", True, "cpu fp32 onnxruntime")
    config = read_config(Path(output["config"]))
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {"max_queue_delay_microseconds": "2000"}
    assert run(store, *dest, "--max-batch-size", "4", "--max-queue-delay", "2ms") == 0
    assert "was served already" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        watch = ("--follow", "--once", "--json", "--registry", store.uri)
        main(["pull", "digits:candidate", *dest, *watch])
    assert json.loads(capsys.readouterr().out)["current"] == str(tmp_path / "m" / "digits")
    assert "dynamic_batching" not in read_config(Path(output["config"])), "the watch was asked for none"


def test_several_targets_lie_together(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_engines(store, [plan(store, "sm_80"), plan(store, "sm_89"), cpu_engine(store, 1)])
    dest = ("--layout", "triton", "--dest", str(tmp_path / "m"))
    for names in (("--target", "sm_80", "--target", "l4"), ("--target", "all")):
        assert run(store, *dest, *names) == 0
        output = capsys.readouterr().out
        assert "chosen: sm_89-fp16.plan: sm_89 fp16 tensorrt of digits@1" in output
        assert [line for line in output.splitlines() if line.startswith("not:")] == [
            "not:    1 engine for other hardware: cpu"
        ], "an engine of a target that was asked for too is not refused"
    assert run(store, *dest, "--target", "sm_80", "--target", "all") == 2
    assert "leave out the others" in capsys.readouterr().err
    assert run(store, "--target", "sm_80", "--target", "l4", "--dest", str(tmp_path / "p")) == 2
    assert "give --layout triton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "owner"),
    [
        (("--max-batch-size", "4"), "triton"),
        (("--no-warmup",), "triton"),
        (("--max-queue-delay", "1ms"), "triton"),
        (("--car", "x"), "kserve"),
    ],
)
def test_options_of_another_layout_are_refused(store: Store, options, owner, capsys) -> None:
    publish_engines(store, [cpu_engine(store, 1)])
    assert run(store, *options) == 2
    assert f"needs --layout {owner}" in capsys.readouterr().err
