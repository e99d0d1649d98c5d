"""Shared by SGLang's and vLLM's engines: replicas in separate processes, routing, restarts, weights."""
