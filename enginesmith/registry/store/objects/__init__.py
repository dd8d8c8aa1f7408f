"""A registry in a bucket of any object store. It uses only requests that S3, Google Cloud Storage and Azure Blob
Storage have in common (`api.BucketApi`).

Conditional writes make it safe for many publishers; a server that ignores them is refused
(`store.require_conditional_writes`).
"""
