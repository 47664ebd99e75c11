"""Runs long work in tasks, on worker processes of this machine or of Ray, so that an interrupted run can resume."""
