"""`python -m regard` is `regard`."""

from regard_cli import main

if __name__ == "__main__":
    main()
