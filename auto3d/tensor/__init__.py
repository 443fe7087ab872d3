"""Split a captured model among tensor-parallel ranks: every weight and value placed, every collective explicit."""
