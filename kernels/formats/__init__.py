FORMAT_NAMES = ("bf16", "fp16", "fp4")
