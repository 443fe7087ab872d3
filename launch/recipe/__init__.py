"""Recipe files: their schema, overrides and errors, and the settings of the engine that follow from them."""
