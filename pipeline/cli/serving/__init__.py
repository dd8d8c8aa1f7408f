"""Commands about what nodes serve: pull and watch, layouts, rollouts."""
