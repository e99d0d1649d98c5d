"""Past one process: SGLang, Ray groups, rollout workers."""
