"""Prometheus metrics, of one run while it lives and of a registry. Only these modules load prometheus-client."""
