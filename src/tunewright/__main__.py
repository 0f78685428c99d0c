"""``python -m tunewright``: the command line."""

from .tools import main

if __name__ == "__main__":
    main()
