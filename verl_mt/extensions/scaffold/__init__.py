"""New projects from templates: `verl-mt init`."""
