"""Fixtures of the laboratory's tests."""

from computed_drafts import every_draft_is_computed as every_draft_is_computed
