"""What a model reads when it writes Python, and what it cannot do with it. No model is needed.

python examples/06_python_tool.py
"""

import asyncio

from rich.console import Console

from verl_mt.data.conversation import ToolCall
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.python_tool import PythonTool
from verl_mt.tools.toolset import ToolSet

WRITTEN = [
    "primes = [n for n in range(2, 60) if all(n % d for d in range(2, n))]\nsum(primes)",
    "primes[-1] / 0",
    "import os\nos.fork()",
    "import socket\nsocket.create_connection(('127.0.0.1', 22))",
    "open('/etc/passwd').read()",
    "print('thinking')\nwhile True:\n    pass",
]


async def main() -> None:
    tools = ToolSet([PythonTool({"keep_state": True, "timeout_s": 1.0})])
    session = ToolExecutor(tools, ToolLimits(), str.split).open("example")
    console = Console(highlight=False)
    for turn, code in enumerate(WRITTEN, start=1):
        (result,) = await session.run([ToolCall("python", {"code": code}, id=f"call_{turn}")], turn=turn)
        console.print(code, style="bold", markup=False)
        console.print(result.text.splitlines()[-1] if "Traceback" in result.text else result.text, "\n", markup=False)
    await session.close()
    console.print({name: amount for name, amount in session.counters.items() if "latency" not in name})


if __name__ == "__main__":
    asyncio.run(main())
