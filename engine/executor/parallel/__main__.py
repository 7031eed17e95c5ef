"""A rank other than 0, started by rank 0."""

from . import follow_leader

follow_leader()
