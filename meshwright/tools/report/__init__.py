"""What people look at after a run: pictures drawn from its metrics."""
