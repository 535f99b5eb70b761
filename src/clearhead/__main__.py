"""`python -m clearhead`: the command line."""

from clearhead.app.cli import main

main()
