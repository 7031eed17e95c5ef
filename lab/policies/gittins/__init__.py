"""An eviction policy that ranks pages by the hits per time expected from keeping them."""

from .policy import Gittins

__all__ = ["Gittins"]
