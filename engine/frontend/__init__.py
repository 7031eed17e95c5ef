"""The asyncio front end, and ``LLM`` for batches: checks, queues and streams of requests."""
