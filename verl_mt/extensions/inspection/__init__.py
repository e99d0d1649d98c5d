"""Look at a run, before it begins and afterwards: doctor, data and template checks, report, prompt log, trackers."""
