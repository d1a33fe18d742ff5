"""State machines: any sequence of calls, and what a model in Python says that each of them must answer."""
