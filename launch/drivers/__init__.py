"""Commands that run for long and start trials: sweep, tune, train, recompute; and where their trials stand."""
