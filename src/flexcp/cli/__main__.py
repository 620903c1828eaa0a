"""`python -m flexcp.cli`: the same as the `flexcp` command."""

from flexcp.cli import main

main()
