"""`python -m` for launchers that take a module: `torchrun -m meshwright.parity record --out FOLDER SCRIPT`."""

from meshwright.parity.command import main

if __name__ == "__main__":
    main()
