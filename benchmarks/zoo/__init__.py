"""Real graphs out of 19 packages, taken the whole way: `make zoo`. What came of each stands in docs/zoo.md."""
