"""``make chaos``: a real server under honest load and attackers of every kind."""
