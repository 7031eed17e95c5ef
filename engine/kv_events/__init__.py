"""KV events in vLLM's format: changes of the prefix cache, published over ZMQ."""
