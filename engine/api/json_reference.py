from __future__ import annotations

from typing import Any


def resolved(schema: Any, ref: str) -> Any:
    """Return what a JSON pointer (RFC 6901) such as ``#/$defs/a`` names; None if it names nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = schema
    for part in ref[2:].split("/") if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
