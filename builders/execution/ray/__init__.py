"""Runs jobs on a Ray cluster: the same processes and limits as on this host, on nodes that meet their needs.

Ray only places jobs. A Ray worker only calls `process.run_job`: results, errors and limits are those of
`LocalExecutor`, and a crash of a compiler ends neither the worker nor the raylet. Paths in a job's arguments must mean
the same on every node (a shared file system).
"""

from builders.execution.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
