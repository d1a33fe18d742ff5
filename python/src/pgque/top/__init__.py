"""The overview in a terminal: `pgque top`.

`app` and `screens` need Textual: `pip install './python[top]'`.
"""
