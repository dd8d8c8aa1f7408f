"""Versions outside of their registry: mirrors and OCI image layouts."""
