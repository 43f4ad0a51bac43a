"""The seam between gateway and model: what a replica is asked, what it streams back, and the replica itself."""

from serve_app.backend.messages import BackendEvent, Bill, Ended, GenerateCall, Rejected, Rejection, Said

__all__ = ["BackendEvent", "Bill", "Ended", "GenerateCall", "Rejected", "Rejection", "Said"]
