"""The weights of a rank's stages: initial values, shards, versions, low-precision copies and gradients."""
