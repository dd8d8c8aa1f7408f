"""A few of the runs of `fault_runs`; what hundreds gave is in docs/concepts/registry.md."""

import gc

import pytest

from tests.enginesmith.registries import on_each_bucket
from tests.enginesmith.registry.fault_runs import run_all


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # botocore drops an answer that it cannot parse
@on_each_bucket
# Three faults: an error 500 after a write, lost answers during an upload in parts, SIGKILL during another upload.
@pytest.mark.parametrize("seed", [18])
@pytest.mark.slow
def test_an_interrupted_publication_loses_nothing_and_a_retry_completes_it(
    servers, server_kind, s3_environment, tmp_path, seed
):
    server = servers.url(server_kind.name)
    tally = run_all(3, seed, server, tmp_path, kind=server_kind.name)
    assert [ends.total() for ends in tally.ends.values()] == [1, 1, 1] and tally.ends["bucket: killed before"]["killed"]
    gc.collect()
