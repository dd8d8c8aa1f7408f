"""The pull-through cache of a registry behind HTTP, `enginesmith cache`: what many nodes ask comes from the registry
once.

The server is aiohttp's (docs/decisions/0023-the-cache-server.md); the rest is in these modules: `served` which keys,
`documents` and `blobs` what is kept of them, `application` the requests, `running` the process.
"""
