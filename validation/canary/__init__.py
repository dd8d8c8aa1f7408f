"""Canaries: traffic is replayed on a candidate and the incumbent, and the observations lead to a verdict."""
