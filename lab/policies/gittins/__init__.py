"""An eviction policy that ranks pages by the hits per time that keeping them promises."""

from .policy import Gittins

__all__ = ["Gittins"]
