"""The documentation site: pages that are generated from the code, and the hook that hands them to MkDocs."""
