"""Octavo's wire contract: the generated messages and stubs of ``octavo.v1``.

The .proto files live in ``octavo/v1`` beside their generated modules. protoc writes imports
after the .proto path, so the generated modules are importable as ``octavo.v1.*`` and only under
that name: a second copy of the same descriptors in one process is an error. ``make proto``
generates them.
"""

from octavo.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

__all__ = ["cache_pb2", "cache_pb2_grpc", "generation_pb2", "generation_pb2_grpc"]
