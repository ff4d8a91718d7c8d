"""Calls of modules that run eagerly: what they read, what they save, and the gradients they produce."""
