"""Mixed precision: number formats, loss scaling, and master weights."""
