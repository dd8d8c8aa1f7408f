"""Real graphs out of 19 packages, taken the whole way: `make zoo`. The results are in docs/zoo.md."""
