"""`verify`: the same engine with and without speculation, compared token for token and distribution by distribution.

One direction: `questions` -> answers of the `subjects` -> comparison of `tokens` and `distributions` -> `report`.
`verification` runs it.
"""
