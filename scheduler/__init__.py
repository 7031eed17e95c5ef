"""Scheduler: decides which sequence computes which tokens in each step."""

from .connector import KVConnector
from .limits import Limits, SequenceTooLong
from .resources import Admission, Resource
from .scheduler import Scheduler
from .types import LatencyGoal, Lookup, SampleResult, ScheduledChunk, SchedulerOutput, Sequence, Status

__all__ = [
    "Admission",
    "KVConnector",
    "LatencyGoal",
    "Limits",
    "Lookup",
    "Resource",
    "SampleResult",
    "ScheduledChunk",
    "Scheduler",
    "SchedulerOutput",
    "Sequence",
    "SequenceTooLong",
    "Status",
]
