"""How far outputs are from each other: pure, mergeable metrics over arrays."""
