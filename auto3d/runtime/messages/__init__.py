"""What ranks send one another: activations, sums of gradients, conversions of a tensor-parallel group, totals."""
