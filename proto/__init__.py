"""Generated messages and stubs of ``octavo.v1``, made by ``make proto``.

Import them only as ``octavo.v1.*``: a second copy of a descriptor in one process is an error.
"""

from octavo.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

__all__ = ["cache_pb2", "cache_pb2_grpc", "generation_pb2", "generation_pb2_grpc"]
