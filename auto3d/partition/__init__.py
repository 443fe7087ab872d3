"""Graph -> stages: where to cut, and what each stage then holds and exchanges."""
