"""Types at the edge of the engine: configuration, sampling parameters, outputs, errors, statistics."""
