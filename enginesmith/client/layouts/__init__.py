"""Layouts of pulled engines on disk for a server: plain, or as a model repository of Triton's."""
