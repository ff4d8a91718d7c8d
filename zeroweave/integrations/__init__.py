"""Bridges to the libraries that zeroweave's users come from."""
