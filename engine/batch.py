"""One step as the runner sees it: flat arrays, no requests and no policy."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.block_manager import PageCopy
from octavo.kernels.metadata import AttentionMetadata, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """T tokens of a mixed step.

    token_ids    [T]  input tokens, rows in the order of ``attention``
    sample_rows  [S]  rows whose logits become tokens; a row appears once per sample drawn
                      from it (n > 1 draws several from the prompt's last row)
    attention         where each row's K/V goes and what it sees
    copies            pages to copy before anything of this step is written
    """

    token_ids: Ints
    sample_rows: Ints
    attention: AttentionMetadata
    copies: tuple[PageCopy, ...] = ()
