"""Rollouts and series of latencies as the site shows them."""
