"""Versions outside their registry: mirrors and OCI image layouts."""
