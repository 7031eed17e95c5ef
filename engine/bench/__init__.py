"""Alias of the package ``octavo_lab.bench``, for scripts that import ``octavo.engine.bench``."""

import importlib.util

_found = importlib.util.find_spec("octavo_lab.bench") if importlib.util.find_spec("octavo_lab") else None
if _found is None or _found.submodule_search_locations is None:
    raise ModuleNotFoundError(
        "octavo.engine.bench must have the laboratory, got an installation without it; "
        "run `pip install ./lab` in the checkout"
    )
__path__ = list(_found.submodule_search_locations)
