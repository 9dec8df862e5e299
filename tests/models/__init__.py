"""Models compared: ours, SGLang's own, transformers', and the reference."""

# Values of the deliberate faults, the same for the served and the reference model.
NEW_BOUND = -4.0
SWAPPED_BETAS = (25.0, 4.0)
