"""Types of the engine's interface: configuration, sampling parameters, outputs, errors, statistics."""
