"""python -m penstock: the command line, where the console script is not on PATH."""

from penstock.cli.main import main

if __name__ == "__main__":
    main()
