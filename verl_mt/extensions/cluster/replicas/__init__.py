"""What SGLang's and vLLM's engines share: replicas in processes of their own, routing, restarts, weights."""
