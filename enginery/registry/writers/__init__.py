"""What whoever writes to a registry does so that no collection deletes what the writing refers to.

`guard` is what writers call; `leases` say who writes, `condemned` what is about to be deleted, `clock` what time it is.
The argument for why this is enough is in docs/retention.md ("Why a collection never hurts a publication").
"""
