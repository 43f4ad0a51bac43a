"""The operator's command line, `serve-app`. Most commands call the service's admin API over HTTP."""
