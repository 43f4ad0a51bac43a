"""Data that processes store on their own disks, and its formats: spools, request logs, exports, seals."""
