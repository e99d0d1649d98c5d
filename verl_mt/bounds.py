"""How large and how deep texts and messages from outside may be: what a model, a server, a file or user code sends.

One module, so that a reader sees all limits at once. Each is far above what honest use needs. What is above it is cut
or refused where it arrives, before anything slower than linear looks at it.
"""

from __future__ import annotations

MAX_FRAME_BYTES = 16 * 2**20
"""Of one message of an MCP server, and of one answer of it over HTTP. An image of 10 MB fits."""
