"""Commands about models: build, plan, golden sets, runs."""
