"""Driving runs: next_step -> perform -> append, until the run waits or ends."""
