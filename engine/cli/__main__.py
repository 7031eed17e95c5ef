"""``python -m octavo.engine.cli``, for where the ``octavo`` script is not installed."""

import sys

from . import main

sys.exit(main())
