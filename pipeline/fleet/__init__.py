"""The fleet: which machines there are, which models must be served on them, and whether the registry has the engines.

Which engine fits a machine is decided by `enginery.client.resolve` and by nothing here: the fleet asks it once for
each kind of node and model.
"""
