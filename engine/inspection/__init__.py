"""What operators ask of the prefix cache: statistics, explanations of misses, reuse."""
