"""Azure Blob Storage, through azure-storage-blob (`enginesmith[azure]`). Imported only for az:// places.

Writes are conditional by `If-None-Match: *` and `If-Match: <etag>`.
"""
