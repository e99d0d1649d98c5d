"""Tools of the toolbox."""
