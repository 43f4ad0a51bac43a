"""The seam between gateway and model: what a replica is asked, what it streams back, and the replica itself."""

from serve_app.backend.messages import BackendEvent, Bill, GenerateCall, Rejected, Rejection

__all__ = ["BackendEvent", "Bill", "GenerateCall", "Rejected", "Rejection"]
