"""What a Plan costs: bytes, predicted from the Graph alone."""
