"""A few of the runs of `fault_runs`; what hundreds gave is in docs/concepts/registry.md."""

import gc
from pathlib import Path

import pytest

from tests.enginery.registry.fault_runs import run_all


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # botocore drops an answer that it cannot parse
@pytest.mark.parametrize("seed", [11])
def test_whatever_happens_to_a_publication_nothing_is_lost_and_a_retry_completes(
    s3_server: str, s3_environment: None, tmp_path: Path, seed: int
) -> None:
    assert run_all(6, seed, s3_server, tmp_path).runs == 6
    gc.collect()
