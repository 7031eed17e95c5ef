"""KV events for programs that listen to vLLM's: what the prefix cache holds, over ZMQ."""
