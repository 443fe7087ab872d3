"""Recipe files: their schema, overrides and errors, and the engine's settings that they give."""
