"""What processes keep on their own disks, and the formats that they write: spools, request logs, exports, seals."""
