"""Candidate against incumbent: traffic recorded and replayed, observations judged, a verdict with its evidence."""
