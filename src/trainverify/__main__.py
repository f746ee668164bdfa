"""`python -m trainverify` is the command line."""

from trainverify.cli import main

main()
