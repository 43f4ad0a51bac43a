"""What crosses a process boundary, once: messages, ports, money, periods, errors, batching."""
