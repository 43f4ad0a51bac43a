"""serve-app: a hosted chat-completion service on Ray Serve."""

__version__ = "0.1.0"
