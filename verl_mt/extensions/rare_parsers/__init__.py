"""Tool parsers beside Hermes: Qwen3-Coder, Llama 3, Mistral, DeepSeek, Kimi, GLM, gpt-oss, Seed-OSS."""
