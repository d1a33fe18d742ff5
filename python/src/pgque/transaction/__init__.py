"""Functions that send, receive and acknowledge in the open transaction of the caller.

Public are the names in `pgque`. `calls` has them, `adapters` knows the connections and sessions of other
libraries, and `portable` gives all drivers the same statements and rows.
"""
