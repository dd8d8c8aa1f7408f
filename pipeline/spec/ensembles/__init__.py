"""Specs of several graphs as one version."""
