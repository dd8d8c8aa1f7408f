"""Who starts a run and who watches it: Prefect flows, deployments, events, runs, metrics, KubeRay."""
