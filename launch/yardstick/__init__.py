"""Predictors scored on the public measurements that the project carries."""
