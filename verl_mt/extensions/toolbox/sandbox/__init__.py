"""Model-written code, isolated: `Sandbox` starts interpreters, `Interpreter.run` runs a piece of code."""

from verl_mt.extensions.toolbox.sandbox.interpreter import CodeResult, Interpreter, Sandbox
from verl_mt.extensions.toolbox.sandbox.policy import SandboxLimits

__all__ = ["CodeResult", "Interpreter", "Sandbox", "SandboxLimits"]
