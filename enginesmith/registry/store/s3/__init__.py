"""Amazon S3 and compatible servers, through boto3. Imported only for s3:// places.

Writes are conditional by `If-None-Match: *` and `If-Match: <etag>`.
"""
