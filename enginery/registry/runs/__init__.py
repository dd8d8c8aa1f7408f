"""Runs of the pipeline on record: their state, how they ended, what builds took."""
