"""Garbage collection of a registry, safe while others write.

The argument for why nothing that is needed can be deleted is in docs/guides/retention.md ("Why a collection never hurts
a publication"); its three parts are `tombstones`, `leases` and `guard` of `writers`. Here `marks` decides what is
kept, `garbage` finds the rest, and `gc` deletes it.
"""
