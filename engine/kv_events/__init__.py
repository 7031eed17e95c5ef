"""KV events for programs that listen to vLLM's: changes of the prefix cache, over ZMQ."""
