"""What the console costs, and how soon its pages are there."""
