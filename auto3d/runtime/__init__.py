"""Plan -> training: stages, exchange, gradient sync, optimizer, data, measurement."""
