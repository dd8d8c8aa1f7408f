"""Operations and bytes of a graph, and the least time for them."""
