"""Everything that a run of the default task does without: one folder per extension.

The core finds an extension through its entry points (`verl_mt.extension_points`) and imports none of them.
"""
