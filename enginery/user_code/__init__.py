"""What runs in the process of a user's code: finding it, calling it, and sending what it computes to the job.

Such a process imports `enginery` alone, as one that serves does, so that the user's own package `pipeline`, `builders`
or `validation` is the only one of its name there (docs/decisions/0013-user-code-in-its-own-process.md).
"""
