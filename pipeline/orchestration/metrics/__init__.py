"""Prometheus metrics, of one run while it lives and of a registry. Only what asks for them loads prometheus-client."""
