"""The reward of `my_project`."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for a right first answer, less for each further one, 0 if none is right. `user.py` makes the turns' scores."""
    scores = extra_info["turn_scores"]
    return scores[-1] / len(scores) if scores else 0.0
