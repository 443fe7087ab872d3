"""x"""

ALGORITHMS = {}
