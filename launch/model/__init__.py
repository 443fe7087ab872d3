"""A recipe's model: how it is built, captured, checked and costed, and the plans that it can run under."""
