"""Tests of `pipeline/drafts`."""
