"""Commands of ``octavo`` that the laboratory has."""
