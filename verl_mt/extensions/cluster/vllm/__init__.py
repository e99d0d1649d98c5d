"""vLLM behind `InferenceEngine`, in a process with another interpreter. See docs/vllm.md."""
