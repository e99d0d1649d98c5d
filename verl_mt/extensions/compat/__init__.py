"""Files and habits of verl, ms-swift and slime: rollout drivers, adapters, aliases, migration, import paths."""
