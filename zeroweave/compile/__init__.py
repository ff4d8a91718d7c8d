"""Compiled regions: what is compiled (`regions`), and the templates that run on the runtime."""
