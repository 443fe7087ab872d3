"""Scripts as users of transformers' Trainer write them, each of another task; test_real.py runs them under plans."""
