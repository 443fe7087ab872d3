"""Schedules made to measure: an order of operations found for given times and memory, and how far it is from the best."""
