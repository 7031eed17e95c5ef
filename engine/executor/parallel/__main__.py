"""A rank other than 0, started by rank 0."""

import logging

from . import follow_leader

logging.getLogger("octavo.engine.executor.load.page_loss").disabled = True  # rank 0 logs the same
follow_leader()
