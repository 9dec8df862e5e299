"""CPU implementations; the reference serves until they land."""
