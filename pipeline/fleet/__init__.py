"""The fleet: which machines there are, which models must be served on them, and whether the registry has the engines.

`enginesmith.client.resolve` decides which engine fits a machine; it is called once for each kind of node and model.
"""
