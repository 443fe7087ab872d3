"""A recipe's model: built, captured, checked, costed, and the plans that it can run under."""
