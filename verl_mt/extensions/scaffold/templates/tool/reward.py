"""The reward of `my_project`."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 if the model's text ends with `#### ` and the right number, else 0."""
    return float(solution_str.strip().endswith(f"#### {ground_truth}"))
