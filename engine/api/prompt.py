"""What a request continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text (encoded as the model expects a document), token ids as they are, or chat messages."""
