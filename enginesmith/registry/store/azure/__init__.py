"""Azure Blob Storage, through azure-storage-blob (extra `azure`). Imported only for az:// places.

Writes are conditional by `If-None-Match: *` and `If-Match: <etag>`.
"""
