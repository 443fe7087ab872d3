from auto3d.search.algorithms.exhaustive import estimate_best

__all__ = ["estimate_best"]
