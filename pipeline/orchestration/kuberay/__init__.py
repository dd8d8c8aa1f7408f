"""Updates the chart's RayCluster while builds run: the code of the chart's Job `RELEASE-ray-apply`."""
