"""`compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0)` under verl's name."""

from verl_mt.rewards.gsm8k import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
