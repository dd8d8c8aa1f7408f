"""A graph with other roundings in it, and what running it measures of what an honest kernel may answer."""
