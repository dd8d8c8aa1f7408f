"""Every name of TensorRT's API that our code uses exists in the bindings of 10.16, 11.0, 11.4 and TensorRT-RTX.

The committed list was read from the bindings themselves (tests/builders/tensorrt_api/bindings.py); with
ENGINESMITH_TENSORRT_BINDINGS=FOLDER_OF_WHEELS it is read again and compared.
"""

import os
from pathlib import Path

import pytest

from builders.backends.tensorrt import editions
from tests.builders.tensorrt_api.bindings import names_in_wheel, public_names, recorded, version_of
from tests.builders.tensorrt_api.used import modules, names_used

NAMES = recorded()
FULL = [release for release in NAMES if not release.startswith("rtx")]
(RTX,) = (release for release in NAMES if release.startswith("rtx"))
# Used on RTX alone.
RTX_ONLY = {
    "ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability",
    "CudaGraphStrategy", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE", "IRuntimeConfig.cuda_graph_strategy",
}  # fmt: skip
USED = {name: used for name, path in modules().items() if (used := names_used(path))}
WHEELS = sorted(Path(os.environ.get("ENGINESMITH_TENSORRT_BINDINGS", "/nowhere")).glob("tensorrt_*bindings-*.whl"))


def test_tested_releases_match_the_claimed_ones():
    assert [release.rpartition(".")[0] for release in FULL] == ["10.16.1", "11.0.0", "11.4.0"]
    assert all(len(NAMES[release]) > 1500 for release in NAMES)
    assert "BuilderFlag.FP16" in NAMES[FULL[0]] and "BuilderFlag.FP16" not in NAMES[FULL[1]]


def test_names_are_collected_from_every_module_that_calls_tensorrt():
    assert USED.keys() >= {"build", "editions", "library", "session"}
    assert USED["library"] >= {"Refitter.get_missing_weights", "OnnxParserRefitter.refit_from_file", "ParserError.desc"}
    assert USED["session"] >= {"ICudaEngine.weight_streaming_budget_v2", "Runtime.engine_host_code_allowed"}
    assert USED["session"] >= {"IExecutionContext.execute_async_v3", "IExecutionContext.set_tensor_address"}
    assert USED["build"] >= {"IProgressMonitor.step_complete"} and USED["library"] >= {"ILogger.log"}
    assert USED["build"] >= {"NetworkDefinitionCreationFlag.STRONGLY_TYPED", "OnnxParser.num_errors"}


@pytest.mark.parametrize("release", FULL)
def test_every_name_used_exists_in_full_tensorrt(release):
    assert set().union(*USED.values()) - NAMES[release] == RTX_ONLY


def test_every_name_used_exists_in_tensorrt_rtx():
    shared_values = set().union(*(used_value for name, used_value in USED.items() if name != "full"))
    assert shared_values - NAMES[RTX] == set()


@pytest.mark.parametrize("release", FULL)
def test_option_names_exist_in_full_tensorrt(release):
    expected = {f"HardwareCompatibilityLevel.{level.upper()}" for level in editions._LEVELS}
    expected |= {f"ProfilingVerbosity.{name}" for name in editions._VERBOSITY.values()}
    assert expected <= NAMES[release]


def test_rtx_capabilities_match_its_bindings():
    capabilities = {
        name.removeprefix("ComputeCapability.SM") for name in NAMES[RTX] if name.startswith("ComputeCapability.SM")
    }
    assert capabilities == {f"{major}{minor}" for major, minor in editions._CAPABILITIES}


def test_the_list_matches_the_installed_bindings():
    trt = pytest.importorskip("tensorrt_rtx")
    if f"rtx {trt.__version__}" not in NAMES:
        pytest.skip(f"the list is of another release than {trt.__version__}")
    assert set(public_names(trt)) == NAMES[RTX]


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS, reason="ENGINESMITH_TENSORRT_BINDINGS names no folder with bindings wheels")
@pytest.mark.parametrize("wheel", WHEELS, ids=version_of)
def test_the_list_matches_the_wheels(wheel):
    assert set(names_in_wheel(wheel)) == NAMES[version_of(wheel)]
