"""Python imports this at start where the folder is on PYTHONPATH: processes that a test starts get the mutant too.

`VERL_MT_MUTATION` names a JSON file: `{"module", "path", "source"}` to swap a module, `{"trace", "targets"}` to record.
"""

import importlib.machinery
import json
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _chain():
    """Another sitecustomize, which this one hides."""
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _begin():
    plan_file = os.environ.get("VERL_MT_MUTATION")
    if plan_file:
        sys.path.insert(0, os.path.dirname(_HERE))
        try:
            import live_code

            with open(plan_file) as file:
                plan = json.load(file)
            if "trace" in plan:
                live_code.Tracer(plan["trace"], plan["root"], plan["targets"]).start()
            else:
                live_code.install_import_hook(plan["module"], plan["path"], plan["source"])
        finally:
            sys.path.remove(os.path.dirname(_HERE))


import importlib.util  # noqa: E402 - `_chain` needs it

_begin()
_chain()
