"""Schedules made to measure: an order of operations for given times and memory, and its distance from the best."""
