"""Data and protocols that cross process boundaries: messages, ports, money, periods and errors."""
