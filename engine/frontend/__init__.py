"""The asyncio edge of the engine, and ``LLM`` for batches: checking, queueing and streaming requests."""
