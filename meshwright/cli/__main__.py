"""`python -m meshwright.cli`."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
