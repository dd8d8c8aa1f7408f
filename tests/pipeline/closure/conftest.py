from tests.pipeline.closure.running import ran

__all__ = ["ran"]
