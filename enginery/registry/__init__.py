"""The registry: where engines, their proof and their history live, and from where serving nodes pull them.

Bytes are blobs, named by their SHA-256. Everything that gives blobs a meaning is a small JSON document under a readable
key (see `keys`). A version exists from the moment its manifest does, and a manifest is written once, last and whole.
"""

# Where a command or a flow looks that was told of no other.
DEFAULT_REGISTRY = "./registry"
