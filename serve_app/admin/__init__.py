"""The HTTP endpoints for operators and account holders, and the OpenAPI document of the whole service."""
