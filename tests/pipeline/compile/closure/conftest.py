from tests.pipeline.compile.closure.running import ran

__all__ = ["ran"]
