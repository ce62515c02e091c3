"""`python -m meshwright`, and `torchrun -m meshwright train RUN.yaml`: the command line."""

from __future__ import annotations

from meshwright.cli import main

if __name__ == "__main__":
    main()
