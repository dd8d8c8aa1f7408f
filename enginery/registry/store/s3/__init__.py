"""A registry in a bucket: Amazon S3 and servers that answer like it, through boto3. Imported only for s3:// registries.

What makes it safe for many publishers is conditional writes (`If-None-Match: *`, `If-Match: <etag>`): `opening` refuses
to publish to a server that ignores them.
"""
