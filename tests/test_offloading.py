"""Chapter 09's library: what all pages share."""
