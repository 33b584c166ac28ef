from tests.sandbox.conftest import machine

__all__ = ["machine"]
