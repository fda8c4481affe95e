"""Serving: the plugin that lets vLLM run converted models, and the command that starts a server."""
