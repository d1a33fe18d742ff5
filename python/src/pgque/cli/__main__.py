"""python -m pgque.cli: the command `pgque`."""

from .program import main

main()
