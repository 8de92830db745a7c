"""`verify`: the same engine with and without speculation, compared token for token and distribution by distribution."""
