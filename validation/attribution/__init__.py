"""Which node drifted: the own error of segments beside the inherited one, and small subsets that repair a graph."""
