"""Operations and bytes of a graph, and the time that they take at least."""
