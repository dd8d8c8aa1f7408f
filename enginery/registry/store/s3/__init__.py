"""A registry in a bucket: Amazon S3 and compatible servers, through boto3. Imported only for s3:// registries.

Conditional writes (`If-None-Match: *`, `If-Match: <etag>`) make it safe for many publishers; a server that ignores them
is refused (`writing.require_conditional_writes`).
"""
