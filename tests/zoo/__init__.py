"""The zoo: many models, each of which must train as with plain PyTorch or be refused in one clear line."""
