"""The chart's RayCluster, brought to what is wanted while builds run: what the chart's Job `RELEASE-ray-apply` does."""
