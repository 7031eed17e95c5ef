"""The documentation site: pages generated from the code, and hooks for MkDocs."""
