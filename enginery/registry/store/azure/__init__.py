"""Azure Blob Storage, through azure-storage-blob (`enginery[azure]`). Imported only for az:// places.

Writes are conditional by `If-None-Match: *` and `If-Match: <etag>`.
"""
