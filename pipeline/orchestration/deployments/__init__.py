"""Objects that `enginesmith prefect deploy` registers with a Prefect server: work pool, deployments with triggers,
concurrency limits."""
