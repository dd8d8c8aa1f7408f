"""What a registry and its nodes cost at the size of ten thousand models and fifty thousand nodes."""
