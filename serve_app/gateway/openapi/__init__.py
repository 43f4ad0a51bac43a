"""`/openapi.json` and `/docs`: what the service offers, for programs and for people."""

from serve_app.gateway.openapi.document import build_document
from serve_app.gateway.openapi.page import documentation_router

__all__ = ["build_document", "documentation_router"]
