"""Configuration, sampling parameters, outputs, errors and statistics of the engine."""
