"""The web console: people sign in and run their accounts. It reaches the books through contracts alone."""
