"""Gets models into memory: folders, hub names and GGUF files, placed, quantized and cached."""
