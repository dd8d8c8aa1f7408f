"""The fleet: its machines, the models that must be served on them, and whether the registry has the engines.

`enginesmith.client.resolve` decides which engine fits a machine. Equal machines are judged once.
"""
