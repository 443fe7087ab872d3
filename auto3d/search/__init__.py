"""Search space -> Plans: search makes Plans, and nothing else decides."""
