"""Front ends of the engine: ``AsyncEngine`` for asyncio, and ``LLM`` for batches."""
