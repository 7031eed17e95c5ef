"""Commands of ``octavo`` in the laboratory."""
