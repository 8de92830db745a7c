"""`verify`: compares an engine with and without speculation, token for token and distribution by distribution.

`verification` sends the `questions` to both `subjects`, compares their answers by `tokens` and `distributions`, and
`report` comes to the verdict.
"""
