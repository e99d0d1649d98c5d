"""vLLM behind `InferenceEngine`, in a process with an interpreter of its own. See docs/vllm.md."""
