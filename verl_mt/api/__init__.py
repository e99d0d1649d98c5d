"""The library as Python calls: `verl_mt.train`, `evaluate_model`, `fine_tune` and `examine` (docs/python_api.md)."""
