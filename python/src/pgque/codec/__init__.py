"""Payloads and other values on their way to SQL and back. Nothing here is public.

`json` and `encode` on the way there, `decode` on the way back, `convert` to the types that handlers name,
and `payloads` for decoders of the program's own.
"""
