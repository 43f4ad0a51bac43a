"""`python -m serve_app.cli` is `serve-app`."""

from serve_app.cli import main

main()
