"""What the numbers of a run say: collapse, a dead start, the critical path of a step."""
