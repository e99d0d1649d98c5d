"""A retrieval server that answers Search-R1's HTTP protocol: `python -m verl_mt.retrieval --corpus FILE`."""
