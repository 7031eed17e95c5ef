"""``octavo.v1``: generation and the prefix cache."""
