"""`python -m clearhead`: the command line."""

from clearhead.cli import main

main()
