"""`python -m autopar`: the command line."""

from autopar.cli.console import main

main()
