"""Which KDA states the prefix cache keeps, and at which depth."""
