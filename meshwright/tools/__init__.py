"""Tools that examine a run before, during and after training. Tools may import the core; the core imports no tool."""
