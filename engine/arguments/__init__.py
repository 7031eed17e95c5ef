"""Command-line arguments that several commands share: model, page formats, addresses, credentials."""
