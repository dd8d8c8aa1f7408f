"""The Prefect flows, one per file: Prefect has order, retries and visibility, plain functions do the work.

The registry stores a step's result by the digest of everything that the step read (`enginesmith.registry.builds.runs`).
So tasks use neither Prefect's cache keys nor its persisted results, whose keys would cover less.
"""

import os

# Here, before any module imports Prefect, which reads them then. Without a server Prefect starts one for the run; on a
# loaded machine that takes longer than its default of 20 s.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
