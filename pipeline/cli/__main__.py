"""`python -m pipeline.cli`: the `enginesmith` command where its script is not on the path."""

from pipeline.cli import main

main()
