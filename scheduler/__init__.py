"""Who computes what in the next step. Standard library and block_manager only."""

from octavo.scheduler.limits import Limits, SequenceTooLong
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.types import Lookup, Result, Sequence, Status, Step, Work

__all__ = [
    "Limits",
    "Lookup",
    "Result",
    "Scheduler",
    "Sequence",
    "SequenceTooLong",
    "Status",
    "Step",
    "Work",
]
