"""The gRPC face of the engine: octavo.v1.Generation, health and reflection. No MLX here."""

from octavo.engine.server.address import Address, parse_address
from octavo.engine.server.server import GrpcServer

__all__ = ["Address", "GrpcServer", "parse_address"]
