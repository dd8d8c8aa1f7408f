"""Start and monitoring of runs: Prefect flows, deployments, events, runs, metrics, KubeRay."""
