"""Google Cloud Storage, through google-cloud-storage (extra `gcs`). Imported only for gs:// places.

Writes are conditional by generation: `ifGenerationMatch`, 0 for an absent object.
"""
