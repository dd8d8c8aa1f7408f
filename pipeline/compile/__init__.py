"""The main job: plan, steps, verdict, publication."""
