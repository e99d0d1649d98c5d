"""Tools beyond a function: sandbox, search, MCP, judge, simulated user, agents behind an endpoint."""
