from auto3d.partition.methods.uniform import uniform

__all__ = ["uniform"]
