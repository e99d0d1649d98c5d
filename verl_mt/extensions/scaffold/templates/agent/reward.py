"""The reward of `my_project`."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 if the agent's answer ends with `#### ` and the right number, else 0."""
    answer = extra_info["rollout_infos"].get("agent", {}).get("answer", "")
    return float(answer.strip().endswith(f"#### {ground_truth}"))
