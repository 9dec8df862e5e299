"""DSpark speculative decoding whose verify stores replay records, never states."""
