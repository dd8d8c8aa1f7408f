"""How pulled engines lie on disk for a server: plain, or as a model repository of Triton's."""
