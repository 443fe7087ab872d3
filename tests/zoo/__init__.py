"""A zoo of models that the engine was not made for: each trains as on plain PyTorch, or is refused in one clear line."""
