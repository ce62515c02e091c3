"""How long a test waits for an expected event: a guard against a hang, which no load of the machine may break.

pytest's timeout (pyproject.toml) is a little longer, so that a test that waits in vain reports the wait itself.
"""

PATIENCE_SECONDS = 800.0
