"""`python -m flexcp.tools.cli`: the same as the `flexcp` command."""

from flexcp.tools.cli import main

main()
