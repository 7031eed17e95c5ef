"""Structured output: which tokens may come next, so that the whole obeys a schema or grammar."""

from octavo.engine.constraints.structured import Structured

__all__ = ["Structured"]
