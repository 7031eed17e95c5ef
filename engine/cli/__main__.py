"""``python -m octavo.engine.cli``, which runs the ``octavo`` command."""

import sys

from . import main

sys.exit(main())
