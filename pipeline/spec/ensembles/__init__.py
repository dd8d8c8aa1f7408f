"""Specs of ensembles: several graphs as one version."""
