"""verl's names of what connects to MCP servers; the connections are those of `verl_mt.tools.mcp_client`."""
