"""Data of builds in a registry: records of steps and their copies, the build history, runs, build locks."""
