"""The asyncio front end, and ``LLM`` for batches: checking, queueing and streaming of requests."""
