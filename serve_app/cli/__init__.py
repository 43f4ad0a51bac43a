"""The operator's command line, `serve-app`. It talks only to the service's admin API, over HTTP."""
