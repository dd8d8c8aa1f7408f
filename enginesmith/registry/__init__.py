"""The registry: stores engines, their proof and their history; serving nodes pull engines from it.

Bytes are blobs, named by their SHA-256. Everything else is small JSON documents under readable keys (`store.layout`)
that refer to blobs. A version exists if its manifest exists. The manifest is written once, atomically, after everything
else.
"""
