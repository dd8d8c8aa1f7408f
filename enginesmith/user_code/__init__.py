"""The code in the process of a user's code: it finds and calls that code, and sends the results to the job.

Such a process imports `enginesmith` alone, as a serving process does, so that a user's own package `pipeline`,
`builders` or `validation` is the only one of its name there (docs/decisions/0013-user-code-in-its-own-process.md).
"""
