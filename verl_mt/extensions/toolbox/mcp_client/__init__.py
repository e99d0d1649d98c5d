"""The client side of the Model Context Protocol: servers as a file declares them, and live connections to them."""
