"""Import paths for files written for verl: the few `verl.utils` modules that tools, interactions and rewards import."""
