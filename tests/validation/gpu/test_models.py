from pathlib import Path

import numpy as np
import pytest

from enginesmith.core.errors import IntegrityError, digest_of_file
from validation.golden.golden_set import freeze
from validation.gpu.cases import load_cases, save_cases
from validation.gpu.models import MODELS, write
from validation.limits.noise_floor import DoubleSession


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_deterministic_and_equal_in_both_precisions(name: str, tmp_path: Path) -> None:
    single_path, half_path = (write(name, precision, "small", tmp_path) for precision in ("fp32", "fp16"))
    (tmp_path / "again").mkdir()
    assert digest_of_file(single_path.path) == digest_of_file(write(name, "fp32", "small", tmp_path / "again").path)
    assert single_path.inputs[0].shape == half_path.inputs[0].shape and half_path.inputs[0].dtype == "float16"
    inputs = single_path.sample(2)
    assert np.array_equal(inputs["x"], inputs["x"].astype(np.float16))
    exact_output = DoubleSession(single_path.path).run(inputs)["y"]
    assert exact_output.shape == single_path.outputs[0].at({"batch": 2})
    assert 0.05 < float(np.abs(exact_output).mean()) < 20, "values keep their size, far from fp16's largest"


def test_a_full_size_model_is_valid(tmp_path: Path) -> None:
    model = write("block", "fp16", "real", tmp_path)
    assert 5e6 < model.path.stat().st_size < 6e7
    assert model.profile.inputs[0][1][0] == 1 and model.batch.min < model.batch.opt < model.batch.max


def test_cases_are_kept_without_safetensors_and_a_change_is_found(tmp_path: Path) -> None:
    model = write("mlp", "fp32", "small", tmp_path)
    golden = freeze([model.sample(2)], model.inputs, [model.batch], DoubleSession(model.path).run)
    save_cases(golden, "a" * 64, tmp_path)
    second_set, digest = load_cases(tmp_path)
    assert digest == "a" * 64
    for case, other_case in zip(golden.cases, second_set.cases, strict=True):
        assert (case.name, case.kind) == (other_case.name, other_case.kind)
        assert np.array_equal(case.inputs["x"], other_case.inputs["x"]) and np.array_equal(
            case.expected["y"], other_case.expected["y"]
        )
    (tmp_path / "cases.npz").write_bytes(b"PK")
    with pytest.raises(IntegrityError, match=r"digest that cases.json gives\); copy the folder again"):
        load_cases(tmp_path)
    (tmp_path / "cases.json").write_bytes(b"[" * 100)
    with pytest.raises(IntegrityError, match="holds no golden cases"):
        load_cases(tmp_path)
