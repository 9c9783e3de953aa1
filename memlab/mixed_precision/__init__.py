"""Number formats by bits, loss scaling and master weights."""
