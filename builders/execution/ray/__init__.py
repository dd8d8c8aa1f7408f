"""Runs jobs on a Ray cluster: the same processes and limits as on this host, placed where their needs are met.

Ray places and nothing else. A Ray worker's only work is `process.run_job`: so results, errors and limits are those of
`LocalExecutor`, and a compiler that crashes takes down neither worker nor raylet. Paths in a job's arguments must mean
the same on every node (a shared file system).
"""

from builders.execution.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
