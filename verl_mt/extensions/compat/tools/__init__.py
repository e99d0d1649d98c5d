"""Tools that verl ships, under their names."""
