"""Models beyond the tests: each trains as on plain PyTorch, or is refused in one clear line."""
