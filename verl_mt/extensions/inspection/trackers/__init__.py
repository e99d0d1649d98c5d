"""The trackers that `trainer.logger` and `rollout.trace.backend` name, a service each.

The core knows them by their dotted paths only (`trainer/tracking.py`): what a run does not ask for is not imported.
"""
