"""Programs for operators: install, ticker, exporter, monitoring, a server for development; and SQL files.

`embedded` and `exporter` are public, as `pgque.embedded` and `pgque.exporter`. `migrations`, `overview` and
`units` are shared by Alembic and Django, and by the web page and `pgque top`.
"""
