"""The report: what a run did, as one HTML file that opens from disk (`python -m verl_mt.report RUN_DIR`)."""
