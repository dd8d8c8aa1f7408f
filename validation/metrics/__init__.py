"""How far outputs are from each other: metrics over arrays whose parts merge."""
