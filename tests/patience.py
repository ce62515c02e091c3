"""How long a test waits for what must come: a guard against a hang, which no load of the machine may break.

pytest's own timeout (pyproject.toml) is a little longer, so that a test that waits in vain says so itself.
"""

PATIENCE_SECONDS = 800.0
