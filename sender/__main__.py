"""`python -m sender`."""

from sender.cli import main

if __name__ == "__main__":
    main()
