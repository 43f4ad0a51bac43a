"""The Ray Serve deployments: thin shells around serve_app."""
