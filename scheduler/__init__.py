"""Who computes what in the next step. Standard library and block_manager only."""

from .connector import KVConnector, NoConnector
from .limits import Limits, SequenceTooLong
from .scheduler import Scheduler
from .types import Lookup, Result, Sequence, Status, Step, Work

__all__ = [
    "KVConnector",
    "Limits",
    "Lookup",
    "NoConnector",
    "Result",
    "Scheduler",
    "Sequence",
    "SequenceTooLong",
    "Status",
    "Step",
    "Work",
]
