"""``vllm.grpc.engine.VllmEngine``, for routers that speak to vLLM."""
