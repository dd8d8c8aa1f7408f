"""The Prefect flows: order, retries and visibility are Prefect's, the work is done by plain functions.

One flow per file, each on one screen. What a step gave is remembered by the registry (`enginery.registry.records`), by
digest of all that it read; so tasks have neither cache keys nor persisted results of Prefect's own, which would say the
same again with less in their keys.
"""

import os

# Here, before any module imports Prefect, which reads them then. Without a server Prefect starts one for the run; on a
# loaded machine that takes longer than its default of 20 s.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
