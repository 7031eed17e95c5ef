"""``vllm.grpc.engine.VllmEngine``, for routers that use vLLM's protocol."""
