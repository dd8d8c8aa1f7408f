"""What the golden set alone does not ask of an engine: sizes between its own, and the same calls again and again."""
