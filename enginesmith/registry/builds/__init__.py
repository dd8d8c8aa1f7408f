"""What builds keep in a registry: records of steps and their copies, what builds took, runs, the lock of a build."""
