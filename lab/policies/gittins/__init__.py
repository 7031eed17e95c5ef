"""An eviction policy that ranks pages by expected hits per time."""

from .policy import Gittins

__all__ = ["Gittins"]
