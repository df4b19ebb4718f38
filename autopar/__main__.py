"""`python -m autopar`: the command line."""

from autopar.cli.plan_commands import main

main()
