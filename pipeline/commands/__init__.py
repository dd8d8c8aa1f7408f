"""The commands, one group of verbs per file. `pipeline.cli` loads each file only when its command is called."""
