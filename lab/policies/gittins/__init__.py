from .policy import Gittins

__all__ = ["Gittins"]
