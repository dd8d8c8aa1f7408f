"""Protects writers to a registry from garbage collection: nothing that they refer to is deleted meanwhile.

Writers call `guard`; `leases` record who writes, `tombstones` what is marked as garbage, `clock` gives the time.
The argument for why this is enough is in docs/guides/retention.md ("Why a collection never hurts a publication").
"""
