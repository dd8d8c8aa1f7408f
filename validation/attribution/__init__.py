"""Which node drifted: local error against inherited error at cut points, and the smallest set of parts that repairs."""
