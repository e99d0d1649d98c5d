"""The doctor: everything that can be looked at before a run, as a short list of what is fine and what is not.

`python -m verl_mt.trainer trainer.dry_run=True ...` and `python -m verl_mt.doctor ...` are the same thing: they
compose the configuration, load tokenizer, template, tools, interactions and reward, render a few rows, read a written
tool call back, run a rollout with a scripted model, and compare settings, disk, memory and time with what is here. No
weights are loaded and no run directory is made. Exit status 0: nothing wrong (perhaps warnings); 2: errors.
"""
