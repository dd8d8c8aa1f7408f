"""What a registry keeps and what it deletes, safely while others write.

The argument for why nothing that is needed can be deleted is in docs/retention.md ("Why a collection never hurts a
publication"); its three parts are `condemned`, `leases` and `guard` of `writers`. Here `marks` says what is kept, and
`gc` does the work.
"""
