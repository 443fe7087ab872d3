"""Long-running commands that start trials: sweep, tune, train, recompute; and the state of their trials."""
