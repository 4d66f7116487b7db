"""What batches and losses agree on: data/ writes targets, models/ reads them, and neither imports the other."""

IGNORE_INDEX = -100
"""Target of a position without loss (the default ignore_index of torch's cross-entropy)."""
