"""Tools beyond a function: sandbox, search, MCP, judge, simulated user, agents at an endpoint, editable sessions."""
