"""What a registry keeps and what it deletes, safely while others write.

The argument for why nothing that is needed can be deleted is in docs/retention.md ("Why a collection never hurts a
publication"); `condemned`, `leases` and `guard` are its three parts, `marks` says what is kept, `gc` does the work.
"""
